"""Silence of transformers, whose messages would come between our progress and errors."""


def quiet_transformers() -> None:
    """Turn off transformers' bars and reports: stderr is for our progress and one-line errors."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
