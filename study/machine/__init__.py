"""The hardware of a study: its needs, and the machine that is there."""
