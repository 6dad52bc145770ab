"""The first screen of study commands, line by line, from verdicts and estimates made by hand."""

from types import SimpleNamespace
from typing import Any

from dynamics.choices.arms import Answer, Ranked, answers_lines
from dynamics.forecast.models import Cooldown, Forecast
from dynamics.forecast.page import Projection, forecast_lines
from quant_eval.estimate import SEEDS, ErrorSource, Estimate
from study.claims.page import claims_table
from study.claims.verdict import Claim, Measure, Verdict
from study.measurements.quantization import DIVERGENCE, QUANTIZED_LOSS
from study.report.text import claims_lines, summary_of
from study.results.power import Components, PowerPlan, Question, overview

SPEC = "gptq-b3-g32"
NOTHING: Any = None  # what these lines never look at


def claim(name: str, sentence: str) -> Claim:
    return Claim(name, sentence, "figure 1", "runs", "losses", lambda _: [], lambda _: True)


WHY = (
    "Peak learning rate 0.012 alone shows nothing, 0.5 [-0.1, 1.1] holds 0. The verdict is on the"
    " mean over 0.012 and 0.024, 0.66 [0.36, 0.96] x 10^-3 nats/token: both together have more data."
)
JUDGED = [
    (
        claim("flat", "The error stays flat while the rate is high"),
        [
            Verdict(
                *("contradicted", "", "0.97 [0.56, 1.38]", 0.007, "1 of 2 beyond"),
                *("0.024: within, 0.12 [-0.20, 0.44]", True),
            )
        ],
    ),
    (
        claim("surge", "The error surges when the rate decays"),
        [Verdict("supported", "", "0.66 [0.36, 0.96]", 0.006, "2 of 2 higher", "", True, why=WHY)],
    ),
    (
        claim("peaks", "A larger peak rate leaves a smaller error"),
        [Verdict("supported", "", "-0.60 [-0.97, -0.22] per 2x", 0.001, "1 of 1 lower")],
    ),
    (claim("methods", "Other methods order the runs alike"), [Verdict("not tested", "no data")]),
]


def test_claims():
    """Holm's correction of 0.001, 0.006 and 0.007 by hand: 0.003, 0.012 and 0.012."""
    lines = claims_table(JUDGED)
    assert summary_of(lines) == (
        "1 of 3 claims supported, 1 contradicted, 1 true of these runs alone; 1 not tested"
    )
    assert list(claims_lines(lines)) == [
        *(
            "claim of arXiv 2510.06213                    verdict              effect"
            "                       Holm p",
            "The error stays flat while the rate is high  contradicted         0.97 [0.56, 1.38]"
            "            0.012",
            "The error surges when the rate decays        supported            0.66 [0.36, 0.96]"
            "            0.012",
            "A larger peak rate leaves a smaller error    holds in these runs  -0.60 [-0.97, -0.22]"
            " per 2x  0.003*",
        ),
        "Effects [95% interval] in 10^-3 nats/token; p corrected for the claims (Holm). * of single",
        "  trainings: other seeds may say otherwise.",
        "Close to the threshold (Holm p 0.01 to 0.25), so that other seeds, or another kind of CPU, may",
        "  decide otherwise: flat, surge.",
        "not tested, for lack of data: methods",
        "",
        "What speaks against:",
        "  flat: 0.024: within, 0.12 [-0.20, 0.44]",
        "",
        "No objection, since the verdict is on the mean over all, with more data than one alone:",
        "  surge: Peak learning rate 0.012 alone shows nothing, 0.5 [-0.1, 1.1] holds 0",
    ]


def estimate(value: float, error: float) -> Estimate:
    """With Student's t of 3 degrees: 3.182 standard errors."""
    return Estimate(value, {SEEDS: ErrorSource(error, 3)})


def test_choice():
    loss = Measure(NOTHING, SPEC, QUANTIZED_LOSS)
    error = Measure(NOTHING, SPEC, DIVERGENCE)
    by_loss = [
        Ranked("0.012", estimate(3.9084, 0.0248)),
        Ranked("0.024", estimate(3.9582, 0.0238), estimate(0.0498, 0.0075), 0.0053),
    ]
    by_error = [
        Ranked("0.024 (anneal phase, 1.02M tokens)", estimate(0.00169, 0.00014)),
        Ranked(
            *("0.012 (anneal phase, 965K tokens)", estimate(0.00196, 0.0001)),
            *(estimate(0.00027, 0.000112), 0.095),
        ),
    ]
    answers = [
        Answer(
            error, "at a loss of 3.9734 nats per token", by_error, title="the peak learning rate"
        ),
        Answer(loss, "at the end of 1,048,576 tokens", by_loss, title="the peak learning rate"),
    ]
    assert list(answers_lines(answers)) == [
        "choose the peak learning rate 0.012 by the quantized loss (GPTQ, 3 bits, groups of 32), at the end",
        "  of 1,048,576 tokens: 0.012 has 3.9084 nats/token; 0.024 has 50 [26, 74] x 10^-3 more (Holm p",
        "  0.0053)",
        "no choice of the peak learning rate by the KL divergence (GPTQ, 3 bits, groups of 32), at a loss of",
        "  3.9734 nats per token: 0.024 (anneal phase, 1.02M tokens) has 1.69 x 10^-3 nats/token; 0.012",
        "  (anneal phase, 965K tokens) has 0.27 [-0.09, 0.63] more (Holm p 0.095) (no significant difference)",
        "",
        "quantized loss (GPTQ, 3 bits, groups of 32) in nats/token, differences in 10^-3 nats/token, at the",
        "  end of 1,048,576 tokens:",
        "  1.  0.012  3.9084 [3.8295, 3.9873]",
        "  2.  0.024  3.9582 [3.8825, 4.0339]  50 [26, 74] more, Holm p 0.0053",
        "",
        "--all adds the rankings by every error and loss, at equal loss, tokens and FLOPs",
    ]


def test_forecast():
    cooldown = Cooldown("a", "a", "a", 768, 786_432, 0.00115, 0.0, 1_048_576, None)
    wide = {"persistence": Forecast(0.00115, (0.000023, 0.0575))}
    narrow = {"persistence": Forecast(0.0011, (0.0009, 0.00134))}
    projected = [
        Projection("0.012, seed 1", "lr1", SPEC, cooldown, (), wide),
        Projection("0.024, seed 1", "lr2", SPEC, cooldown, (), narrow),
        Projection("0.048, seed 1", "lr3", SPEC),
    ]
    study = SimpleNamespace(quantization=SimpleNamespace(specs=(SPEC,)))
    source: Any = SimpleNamespace(study=study, cooldowns=lambda _: [])
    assert list(forecast_lines(source, [], projected)) == [
        "2 runs, if annealed now: KL divergence (GPTQ, 3 bits, groups of 32) of 1.1 to 1.15 by persistence",
        "  (10^-3 nats/token), uncertain by a factor of 1.2 to 50",
        "Which model forecasts best is not decided: 0 cooldowns rank the models, 10 would decide.",
        "",
        "run            at step  annealed to   now   persistence",
        "0.012, seed 1      768  1.05M tokens  1.15  1.15",
        "0.024, seed 1      768  1.05M tokens  1.15  1.10 [0.90, 1.34]",
        "KL divergence (GPTQ, 3 bits, groups of 32), 10^-3 nats/token: now, and after the anneal by each",
        "  model",
        "no forecast of 0.048, seed 1: no checkpoint of its stable phase is measured yet",
        "no forecast of any run by mean ratio; tokens and learning rate: the learning rate is not known, or",
        "  there are too few cooldowns of other settings, each with its seeds taken as one",
        "--all adds every spec, every interval, what was learned from, and averages",
    ]


def test_power():
    """A difference as large as the deviation between seeds: 80% power takes ten of them."""
    components = Components(PowerPlan(5, 100, 1), {frozenset({SEEDS}): 1e-6}, evenness=1.0)
    question = Question("annealed against its control", DIVERGENCE, 0.01, 0.001, components, [])
    assert list(overview([question])) == [
        "comparison                    figure  power now  seeds  with 4x documents",
        "annealed against its control      10        40%     10                 10",
    ]
