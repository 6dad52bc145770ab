"""The claims of arXiv 2510.06213 that a study can test, in our words."""

from study.claims.data import budgets, schedules
from study.claims.flatness import across_runs, along_the_anneal
from study.claims.schedule import divergence, flat, surge
from study.claims.sweep import averages, bits, matched, methods, peaks
from study.claims.verdict import Claim, by_measure

CLAIMS = (
    Claim(
        "flat",
        "While the learning rate is high the error stays flat, although the tokens grow.",
        "abstract, figure 1",
        "two checkpoints at a high rate and one after its decay",
        by_measure(flat),
    ),
    Claim(
        "surge",
        "When the learning rate decays the error surges.",
        "abstract, figure 1, appendix E.4",
        "a checkpoint before and one after the decay",
        by_measure(surge),
    ),
    Claim(
        "divergence",
        "In the decay loss and error part: the full-precision loss falls and the error rises.",
        "abstract",
        "a checkpoint before and one after the decay",
        by_measure(divergence),
    ),
    Claim(
        "peaks",
        "The larger the peak learning rate, the smaller the error at the end of training.",
        "section 5.1, figure 23",
        "runs that differ in their peak learning rate alone",
        by_measure(peaks),
    ),
    Claim(
        "matched",
        "That holds where the larger rate costs no full-precision loss.",
        "section 5.1, figure 23",
        "runs that differ in their peak learning rate alone, two of them with about the same loss",
        by_measure(matched),
    ),
    Claim(
        "averages",
        "Averages of weights quantize better than the annealed weights.",
        "section 5, appendix C",
        "averages kept in training, or soups, of runs that anneal",
        averages,
    ),
    Claim(
        "budgets",
        "More data does not by itself raise the error: it does not grow with the length of the constant phase.",
        "abstract, section 5, figure 5",
        "runs that hold the rate and anneal, and differ in their length alone",
        by_measure(budgets),
    ),
    Claim(
        "schedules",
        "Under cosine the error grows faster with the data than under cooldowns from a constant rate.",
        "figure 5",
        "two budgets under each of the two schedules",
        by_measure(schedules),
    ),
    Claim(
        "sharpness",
        "Flatter minima quantize better: over the runs error and curvature rise together.",
        "section 6.2, appendix G",
        "curvature at the end of three runs or more",
        across_runs,
    ),
    Claim(
        "sharpening",
        "In the decay curvature and error rise together.",
        "section 6.2, appendix G",
        "curvature before and after the decay",
        by_measure(along_the_anneal),
    ),
    Claim(
        "methods",
        "Other methods of quantization order the runs alike.",
        "appendix A",
        "further methods at the end of two runs or more",
        methods,
    ),
    Claim(
        "bits",
        "Fewer bits cost more.",
        "appendix E.4, figure 23",
        "a method at two widths",
        bits,
    ),
)
