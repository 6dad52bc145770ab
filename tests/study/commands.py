"""`python -m study` in this process."""

import pytest
from typer.testing import CliRunner

from base.errors import UserError
from study.__main__ import app


def printed(*arguments: object) -> str:
    """Standard output of a command; a refusal is raised."""
    done = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*arguments: object) -> str:
    """The line of a refused command."""
    with pytest.raises(UserError) as refusal:
        printed(*arguments)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)
