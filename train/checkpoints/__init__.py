"""Checkpoints: saved while training continues, and resumed from.

A checkpoint becomes complete in six steps, and fails whole in any of them:

1. `Saver.copy`: every rank copies its state of this step, or weights alone, to host memory that is
   kept (`train.snapshot_memory`); training may continue.
2. `PendingCheckpoint.write`: every rank writes, syncs and hashes its files in an unfinished
   directory `.unfinished.NAME.attemptN` beside the final one, in a thread if `saving.asynchronous`.
3. `PendingCheckpoint.seal`: once every rank has written, the files that ranks share; then rank 0
   writes the probe and checkpoint.json, which records size and BLAKE3 of every file.
4. Rank 0 looks into environment.json: where a newer attempt has begun, this one ends.
5. `PendingCheckpoint.publish`: rank 0 renames the directory: the checkpoint is complete.
6. Restart checkpoints beyond `saving.restart_keep` go, checkpoint.json first; at the end all do.

A save that fails ends training with an error. A crash loses the steps since the last complete
checkpoint with optimizer state: permanent ones may hold weights alone (`saving.full_steps`), and
are published before the restart checkpoint of their step, so that none is passed over. The next
attempt removes unfinished directories (`remove_unfinished`), and `resuming` loads the newest
full checkpoint whose hashes are as recorded; a damaged one is moved to RUN/quarantine. A permanent
checkpoint that is complete is never written again.

Read in this order: saving, attempt, resuming.
"""
