"""The lines of `python -m study status`."""

from collections.abc import Iterator

from study.pipeline.ledger import Ledger


def status_lines(ledger: Ledger) -> Iterator[str]:
    """Yield a line per kind of step, and which runs diverged; steps left out are none to wait for.

    Of each kind the first step that is open, and why; then every damaged file.
    """
    steps = list(ledger.steps.values())
    complete, left_out = ledger.complete_steps(), ledger.steps_left_out()
    ended = complete | left_out.keys()
    for kind in dict.fromkeys(step.kind for step in steps):
        own = [step for step in steps if step.kind == kind]
        line = f"{kind:10} {sum(step.name in complete for step in own)}/{len(own)}"
        reasons = [left_out[step.name] for step in own if step.name in left_out]
        if reasons:
            line += f"  {left_out_words(reasons)}"
        first = next((step for step in own if step.name not in ended), None)
        if first:
            awaited = [f"waits for {name}" for name in first.after if name not in ended]
            line += f"  next: {first.name}: {awaited[0] if awaited else ledger.reason(first)}"
        yield line
    for words in dict.fromkeys(ledger.damage(step) for step in steps):
        if words:
            yield f"damaged: {words}"
    for step in steps:
        status = ledger.divergence(step)
        if status:
            yield f"{status.words}; that is a result, it is not trained again"
    yield f"{len(complete)}/{len(steps)} steps complete in {ledger.directory}"


def left_out_words(reasons: list[str]) -> str:
    """Return '3 left out: lr1 diverged at step 2', with every reason once."""
    return f"{len(reasons)} left out: {'; '.join(dict.fromkeys(reasons))}"
