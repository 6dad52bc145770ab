"""The pages of the project, and what generates parts of them."""
