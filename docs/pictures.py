"""Draw the pictures of the design pages: python -m docs.pictures writes docs/pictures/NAME.svg.

Their numbers come from the project's own code, at sizes of some seconds.
"""

from importlib import import_module
from pathlib import Path

import vl_convert

FOLDER = Path(__file__).parent


def main() -> None:
    """Draw every module of docs/drawn."""
    for module in sorted((FOLDER / "drawn").glob("[a-z]*.py")):
        draw = getattr(import_module(f"docs.drawn.{module.stem}"), module.stem)
        picture = FOLDER / "pictures" / f"{module.stem}.svg"
        picture.write_text(vl_convert.vegalite_to_svg(draw()))
        print(picture.relative_to(FOLDER.parent))


if __name__ == "__main__":
    main()
