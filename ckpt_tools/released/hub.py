"""The hub of Hugging Face, with errors of one line."""

from collections.abc import Iterator
from contextlib import contextmanager

from httpx import HTTPError
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from base.errors import UserError

UNREACHED = (HTTPError, OfflineModeIsEnabled, LocalEntryNotFoundError, FileMetadataError)


@contextmanager
def hub(repo: str) -> Iterator[HfApi]:
    """Open the hub at HF_ENDPOINT, by default huggingface.co, with HF_TOKEN or `hf auth login`.

    Raises:
        UserError: within the block a repository or revision is not there, or the hub is not
            reached.
    """
    api = HfApi()
    try:
        yield api
    # From narrow to wide: a gated repository is also not found, and all are errors of HTTP.
    except GatedRepoError:
        raise UserError(
            f"{repo} is gated; accept its terms on the hub, then log in with 'hf auth login'"
        ) from None
    except RevisionNotFoundError as error:
        raise UserError(
            f"{repo} has no such revision ({_short(error)}); list them with 'python -m ckpt_tools"
            " download ... --dry-run'"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{repo} is not on the hub, or not for you; correct it, or log in with 'hf auth login'"
        ) from None
    except UNREACHED as error:
        raise UserError(
            f"{api.endpoint} was not reached for {repo} ({_short(error)}); run again, or download"
            " where there is a network and give that directory"
        ) from None


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:150] or type(error).__name__
