"""The work beside the steps of a run: ranks agree, and a watchdog looks on."""
