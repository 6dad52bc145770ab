"""Trajectories whose revisions are named and listed, of models that no family here computes.

Olmo 3 attends in windows; open-sci-ref comes with code of its own, which is never run.
"""

from train.model.families.released import Stage, Trajectory, main


def _olmo3(repo: str) -> Trajectory:
    """Return an Olmo 3, of which the names of stage 1 are known alone."""
    stage1 = Stage(name="stage1", template="stage1-step{S}", starts_at=None)
    return Trajectory(repo=repo, stages=(stage1, main()))


def _open_sci() -> Trajectory:
    pretraining = Stage(
        name="pretraining", template="iter_{S:07}", schedule="WSD", source="arXiv 2509.09009"
    )
    return Trajectory(
        repo="open-sci/open-sci-ref-v0.01-SIZE-DATASET-TOKENS-CONTEXT",
        stages=(pretraining, main()),
        pattern=r"open-sci/open-sci-ref-v0\.01-[0-9.]+b-[A-Za-z0-9._-]+",
    )


UNMEASURED = (_olmo3("allenai/Olmo-3-1025-7B"), _open_sci())
