"""Studies that vary something else than the peak learning rate, made of the tiny one."""

from base.frozen import fingerprint
from study.definition import Study
from study.recipes.parts import sweep
from train.data.config import RepetitionFilter
from train.run.config import BranchFrom, RunConfig
from train.run.optimization import Anneal, ConstantPhase, CosinePhase, ScheduleConfig

STEPS = (64, 160, 320, 480, 640)  # of the stable run; cooldowns start at the last three


def bare(study: Study, **changed: object) -> Study:
    """A study that quantizes its checkpoints, and measures no further method or average."""
    quantization = study.quantization.model_copy(update={"methods": (), "by_block": ()})
    only = {"quantization": quantization, "averaged_steps": (), "soups": ()}
    return study.model_copy(update=only | changed)


def weight_decay(study: Study) -> Study:
    """One run for each weight decay."""
    values = {"wd0": 0.0, "wd0.03": 0.03, "wd0.1": 0.1, "wd0.3": 0.3}
    base = study.runs[1]
    assert isinstance(base, RunConfig)
    runs = tuple(
        base.model_copy(
            update={
                "name": name,
                "averages": (),
                "optimizer": base.optimizer.model_copy(update={"weight_decay": value}),
            }
        )
        for name, value in values.items()
    )
    return bare(study, name="decays", runs=runs)


def limits(study: Study) -> Study:
    """A run without a limit of repetitions among those with one: a word among numbers."""
    base = study.runs[1]
    assert isinstance(base, RunConfig)

    def run(name: str, limit: int | None) -> RunConfig:
        found = limit and RepetitionFilter(max_count=limit)
        data = base.data.model_copy(update={"repetition_filter": found})
        return base.model_copy(update={"name": name, "averages": (), "data": data})

    return bare(study, name="limits", runs=tuple(sweep(run, limit=[None, 8, 32])))


def budgets(study: Study) -> Study:
    """Cooldowns from one stable run, and cosine schedules, at three budgets."""
    base = study.runs[1]
    assert isinstance(base, RunConfig)
    per_step, warmup = base.tokens_per_step, base.schedule.warmup_tokens
    constant = ScheduleConfig(warmup_tokens=warmup, phase=ConstantPhase())
    stable = base.model_copy(
        update={
            "name": "stable",
            "schedule": constant,
            "save_steps": STEPS,
            "total_steps": STEPS[-1],
            "averages": (),
        }
    )
    runs = [stable]
    for start in STEPS[-3:]:
        end = start * 5 // 4
        cosine = ScheduleConfig(
            warmup_tokens=warmup, phase=CosinePhase(horizon_tokens=end * per_step, floor=0.0)
        )
        cooldown = constant.model_copy(update={"anneal": Anneal(start_step=start)})
        branch = BranchFrom(run="../stable", step=start, fingerprint=fingerprint(stable))
        kinds = (
            ("wsd", cooldown, {"save_steps": (start + start // 8, end), "branch_from": branch}),
            ("cosine", cosine, {"save_steps": (end // 4, end // 2, end)}),
        )
        for name, schedule, changed in kinds:
            changes = {"name": f"{name}{end}", "schedule": schedule, "total_steps": end, **changed}
            runs.append(stable.model_copy(update=changes))
    return bare(study, name="budgets", runs=tuple(runs))
