"""The work beside the steps of a run: ranks agree, a watchdog looks on, a profiler records."""
