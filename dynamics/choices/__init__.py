"""Choices that a study decides for its user: learning rate or arm, average, cooldowns."""
