"""Choices that a study decides for its user: learning rate, average, cooldowns."""
