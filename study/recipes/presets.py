"""Presets: settings of a study that go together and have one name, as in `--set settings=paper`.

A preset is a function of a study, with the decorator `preset`, that a package names in its content
(`study.content`). It is applied to the recipe's study before every other setting.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name

from base.errors import UserError
from base.names import take_one_of
from base.settings import path_of
from study.content import described, preset_places, with_hyphens
from study.definition import Study

PRESET = "settings"  # the path whose value is the name of a preset


@dataclass(frozen=True)
class Preset:
    """A function that changes what a study measures, with its name and description."""

    change: Callable[[Study], Study]

    @property
    def name(self) -> str:
        """The function's name with hyphens."""
        return with_hyphens(self.change.__name__)

    @property
    def description(self) -> str:
        """The first line of the function's docstring."""
        return described(self.change)

    def __call__(self, study: Study) -> Study:
        """Return the changed study, whose description says the preset's."""
        description = f"{study.description} [{PRESET}={self.name}: {self.description}]"
        return self.change(study).model_copy(update={"description": description})


def preset(change: Callable[[Study], Study]) -> Preset:
    """Make a preset of a function `NAME(study: Study) -> Study` with a docstring."""
    return Preset(change)


def is_preset(setting: str) -> bool:
    """Return whether PATH=VALUE names a preset."""
    return path_of(setting) == PRESET


def with_presets(study: Study, settings: tuple[str, ...]) -> Study:
    """Return the study with the preset that one of these settings names, if any.

    UserError for a name that no content has, or for several.
    """
    named = [setting for setting in settings if is_preset(setting)]
    if len(named) > 1:
        raise UserError(f"--set {named[1]}: {named[0]} is given, too; leave one of the two out")
    for setting in named:
        name, places = setting.partition("=")[2], preset_places()
        if name not in places:
            raise UserError(f"--set {setting:.100}: no such preset; {take_one_of(name, places)}")
        found: Preset = resolve_name(places[name])
        return found(study)
    return study
