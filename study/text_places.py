"""Places of the token files and the tokenizer of a study's text, as commands name them."""

from study.layout import CORPUS
from study.text import TEXTS, OwnText, PreparedText, StandardLibrary, TokenFiles

Text = StandardLibrary | PreparedText | OwnText | TokenFiles
DATA = "{study}/data"


def places_of(text: Text) -> dict[str, str]:
    """Return PREFIX of the token file for every use, and the directory of the tokenizer.

    The keys are train, held_out, calibration and tokenizer, those that there are.
    """
    if isinstance(text, PreparedText):
        places = {use: f"{{root}}/{TEXTS}/{file.name}" for use, file in text.files.items()}
        return places | {"tokenizer": f"{{root}}/{text.tokenizer_directory}"}
    if isinstance(text, TokenFiles):
        places = {"held_out": text.held_out, "calibration": text.calibration, "tokenizer": text.tokenizer}
        return ({"train": text.train} if text.train else {}) | places
    if isinstance(text, OwnText):
        uses = ("train", "held_out", "calibration") if text.train else ("held_out", "calibration")
        return {use: f"{DATA}/{use}" for use in uses} | {"tokenizer": f"{DATA}/tokenizer"}
    places = {"train": f"{DATA}/train", "held_out": f"{DATA}/held_out", "calibration": f"{DATA}/train"}
    return places | {"tokenizer": f"{{study}}/{CORPUS}/tokenizer"}
