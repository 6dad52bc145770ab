"""The command line of a folder: its group, its options, and the end of a refused command."""

import errno
import functools
import gc
import inspect
import operator
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from base import stopping
from base.environment import is_rank_zero, version_line
from base.errors import UserError, explain_validation, one_line
from base.names import take_one_of
from base.sharing import closed_to_group

# torchrun ends the other ranks within a second of rank 0, later on a busy machine.
SILENCE_OF_OTHER_RANKS_SECONDS = 5.0
# A disk with a fault, a server that is away, a filesystem that was exported anew.
NO_ANSWER = (errno.EIO, errno.ETIMEDOUT, errno.ESTALE)


# typer holds its copy of click in a place that it calls private; the classes' own module is public.
USAGE: Any = sys.modules[typer.BadParameter.__bases__[0].__module__]
CHOICE = re.compile(r".*?(['\"])(.*)\1 is not one of (.*)", re.DOTALL)
COMMAND = re.compile(r"No such command (['\"])(.*?)\1")


def command_group(description: str) -> typer.Typer:
    """Return the group that takes a folder's commands; it answers --help and --version.

    Args:
        description: docstring of the folder's `__main__`, whose first paragraph is the help.
    """
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # a rich table cuts option names at 80 columns
        help=description.partition("\n\n")[0],
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(version_line())
            raise typer.Exit

    @app.callback()
    def group(
        version: Annotated[
            bool,
            typer.Option(
                "--version",
                callback=show_version,
                is_eager=True,
                help="Show versions and exit.",
            ),
        ] = False,
    ) -> None:
        """Take what comes before a command's name."""

    return app


def options_of(settings: type[BaseModel]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option for each described field of settings, and call it with them.

    The command's parameter `settings` takes the object; its other parameters stay. Name, type and
    default of an option are those of the field, its help is the field's description. A field
    without description is not an option: a kind, or a constant that results record. Options
    equal to their default are not passed on: `settings.model_fields_set` is what the user changed.
    `arguments_of` is the inverse.

        @options_of(TraceSettings)
        def trace(hf_dir: Path, settings: TraceSettings) -> None: ...
    """
    fields = {name: field for name, field in settings.model_fields.items() if field.description}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def from_options(**values: Any) -> None:
            options = {name: values.pop(name) for name in fields}
            changed = {
                name: value for name, value in options.items() if value != fields[name].default
            }
            try:
                values["settings"] = settings(**changed)
            except ValidationError as error:
                raise explain_validation(command.__name__.replace("_", "-"), error) from None
            command(**values)

        signature = inspect.signature(command)
        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in signature.parameters.values()
            if parameter.name != "settings"
        ]
        parameters += [_option(name, field) for name, field in fields.items()]
        # typer reads both of them: it has to see the options in place of `settings`.
        from_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        from_options.__annotations__ = {option.name: option.annotation for option in parameters}
        return from_options

    return decorate


def arguments_of(settings: BaseModel) -> list[str]:
    """Return the words that give a command of `options_of` these settings.

    Defaults are stated, too: the words mean the same in a version with other defaults.

    Raises:
        ValueError: no option can give a value, such as None where another one is the default.
    """
    words: list[str] = []
    for name, value in settings:
        field, flag = type(settings).model_fields[name], name.replace("_", "-")
        if isinstance(value, bool) and field.description:
            # a flag that is off by default has no --no-
            words += [f"--{flag}"] if value else [f"--no-{flag}"] * bool(field.default)
        elif value is not None and field.description:
            words += [f"--{flag}", str(value)]
        elif value != field.default:
            raise ValueError(f"no option makes {name} {value}; leave it at {field.default}")
    return words


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the parameter that typer makes the option of a field from."""
    words, flag = str(field.description), name.replace("_", "-")
    declared = f"--{flag}/--no-{flag}" if field.default is True else f"--{flag}"
    option = typer.Option(declared, help=f"{words[:1].upper()}{words[1:]}.")
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if field.is_required() else field.default,
        annotation=Annotated[_plain(field.annotation), option],
    )


def _plain(kind: Any) -> Any:
    """Return a type, or a union of types, without the limits that pydantic checks."""
    if get_origin(kind) in (Union, UnionType):
        return functools.reduce(operator.or_, map(_plain, get_args(kind)))
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import torch and transformers within the block, in two thirds of the time.

    The garbage collector is off, as it would scan a million new objects. scikit-learn is hidden:
    transformers imports it, with scipy and pandas, where it is installed, for one kind of
    generation.
    """
    modules: dict[str, Any] = sys.modules
    hides = "sklearn" not in modules
    if hides:
        modules["sklearn"] = None  # as if it were not installed
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if hides:
            del modules["sklearn"]


def run_command(app: typer.Typer, name: str, synonyms: Mapping[str, str] = {}) -> None:
    """Run a command line; what it cannot mean, a UserError or OSError ends with one line and 2.

    Args:
        app: commands of a folder.
        name: that of the folder.
        synonyms: by command or option, the words that other programs have for it.
    """
    try:
        # Not standalone, or click would print errors of its own, in several lines.
        sys.exit(app(prog_name=f"python -m {name}", standalone_mode=False) or 0)  # of `typer.Exit`
    except USAGE.NoArgsIsHelpError as help_page:
        help_page.show()
        sys.exit(help_page.exit_code)
    except USAGE.UsageError as error:
        _refuse(_usage(error, f"python -m {name}", synonyms))
    except (UserError, OSError) as error:
        _refuse(line_of(error))
    finally:
        gc.freeze()  # the interpreter's last collection would take a second where torch is


def line_of(error: UserError | OSError) -> str:
    """Return the line that a command ends with: what is wrong; what to do next.

    An OSError is a path of the wrong kind, without permission, or on a full disk.
    """
    if isinstance(error, UserError):
        return str(error)
    location = f"{error.filename}: " if error.filename else ""
    remedy = "correct the path or its permissions, or free space"
    if error.errno in NO_ANSWER:
        remedy = "look at its disk, mount or server"
    line = f"{location}{error.strerror or error}; {remedy}, and run again"
    return closed_to_group(error) or line


def _usage(error: Any, program: str, synonyms: Mapping[str, str]) -> str:
    """Return one line about a command line: what is wrong, and the nearest name or the help."""
    message = error.format_message().rstrip(".").replace("Value error, ", "")
    context, command = error.ctx, error.ctx.command_path if error.ctx else program
    if chosen := CHOICE.fullmatch(error.message.rstrip(".")):
        name, names = chosen[2], [word.strip("' ") for word in chosen[3].split(",")]
        message = f"{error.param.opts[-1]} cannot be {name!r:.80}"
    elif context and isinstance(error, USAGE.NoSuchOption):
        name = error.option_name
        names = [option for each in context.command.params for option in each.opts]
        names = [option for option in names if option.startswith("--")]
        message = f"'{command}' has no option {name:.80}{_elsewhere(name, context)}"
    elif context and (unknown := COMMAND.match(message)):
        name, commands = unknown[2], context.command.commands
        names = [each for each, of_name in commands.items() if not of_name.hidden]
        message = f"'{command}' has no command {name!r:.80}"
    else:
        return f"{message}; see '{command} --help'"
    return f"{message}; {take_one_of(name, names, synonyms)}"


def _elsewhere(option: str, context: Any) -> str:
    """Return which commands beside this one have an option, in words."""
    commands = getattr(context.parent.command, "commands", {}) if context.parent else {}
    having = [
        each
        for each, command in commands.items()
        if not command.hidden and any(option in parameter.opts for parameter in command.params)
    ]
    return f", which {', '.join(having)} {'has' if len(having) == 1 else 'have'}" * bool(having)


def _refuse(line: str) -> None:
    """End this process with the message; rank 0 prints first, later any rank still alive."""
    if not is_rank_zero():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun ends the silent ranks with it
        if stopping.terminated():  # it was faster
            os._exit(2)
        time.sleep(SILENCE_OF_OTHER_RANKS_SECONDS)
        line = f"rank {os.environ['RANK']}: {line}"
    print(f"error: {one_line(line)}", file=sys.stderr, flush=True)
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_initialized():
        # A gloo thread that frees its tensors while the interpreter goes down aborts the process
        # with SIGABRT.
        sys.stdout.flush()
        os._exit(2)
    sys.exit(2)
