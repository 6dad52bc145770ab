"""Released models with a trajectory: step, tokens and learning rate from a revision's name.

Every figure comes from the source named beside it; a figure without a source is None.
"""

from base.errors import UserError
from base.names import take_one_of
from ckpt_tools.released.olmo import OLMO_FAMILIES
from ckpt_tools.released.others import OTHER_FAMILIES
from ckpt_tools.released.revisions import Family, Revision

FAMILIES = (*OLMO_FAMILIES, *OTHER_FAMILIES)


def family_of(repo: str) -> Family:
    """Return the family of a repository of the hub; UserError for one that is not known."""
    for family in FAMILIES:
        if family.has(repo):
            return family
    repos = [family.repo for family in FAMILIES]
    raise UserError(
        f"{repo} is not a known trajectory; {take_one_of(repo, repos)}, or say how its revisions"
        " are named (in a study --set pattern=step{S})"
    )


def repo_of_directory(name: str) -> str | None:
    """Return the known repository that a directory is named after, as OWNER--NAME or NAME."""
    owners = {family.repo.partition("/")[0] for family in FAMILIES}
    repos = [name.replace("--", "/", 1), *(f"{owner}/{name}" for owner in sorted(owners))]
    return next((repo for repo in repos for family in FAMILIES if family.has(repo)), None)


def parse_revision(repo: str, revision: str) -> Revision:
    """Return stage and step from the name of a revision, with its tokens and learning rate.

    The first 3.9T tokens of this one are those of stage 1:
        >>> parse_revision("allenai/OLMo-2-1124-7B", "stage2-ingredient1-step1000-tokens5B").tokens
        3899217936384

    Raises:
        UserError: the repository is unknown, or the name is not one of its revisions.
    """
    return family_of(repo).parse(repo, revision)
