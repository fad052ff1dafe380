"""Options that are generated from the signature of a function."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from lrl.cli.command import command, command_line
from lrl.ranges import PositiveInt

SEEN: list[Any] = []


@dataclass(frozen=True, kw_only=True)
class Size:
    """Options of the size."""

    width: PositiveInt = 3
    """Width in pixels."""
    names: dict[str, Any] = field(default_factory=dict)
    """Names of the sides."""


def draw(
    files: list[Path],
    *,
    size: Size,
    colour: Literal["red", "blue"] = "red",
    labels: list[str] | None = None,
    bounds: tuple[float, float] | None = None,
    bold: bool = False,
    frame: bool = True,
    rate: float = 0.5,
) -> None:
    """Draw files with a frame.

    lrl draw a.png --bold

    Args:
        files: Files that are drawn.
        size: Size of the picture.
        colour: Colour of the lines.
        labels: Labels of the files.
        bounds: Lowest and highest value.
        bold: Draw thick lines.
        frame: Draw a frame.
        rate: Rate of the drawing.
    """
    SEEN.append((files, size, colour, labels, bounds, bold, frame, rate))


def parsed(words):
    SEEN.clear()
    command(draw)("lrl draw", words.split())
    return SEEN[0]


def test_what_is_not_given_has_the_default_of_the_function():
    assert parsed("a b") == ([Path("a"), Path("b")], Size(), "red", None, None, False, True, 0.5)


def test_every_kind_of_option_becomes_the_value_of_its_type():
    words = 'a --width 5 --names {"n":[1,null]} --colour blue --labels x=1 y --labels z'
    found = parsed(f"{words} --bounds -1 2.5 --bold --no-frame --rate=1e-3")
    size = Size(width=5, names={"n": [1, None]})
    assert found == ([Path("a")], size, "blue", ["x=1", "y", "z"], (-1.0, 2.5), True, False, 0.001)
    assert type(found[1].width) is int
    assert command_line("lrl draw").startswith('lrl draw a --width 5 --names \'{"n"')


def test_the_help_has_the_docstrings_types_and_defaults(capsys):
    with pytest.raises(SystemExit) as end:
        parsed("--help")
    shown = capsys.readouterr().out
    assert end.value.code == 0 and "Draw files with a frame.\n\nlrl draw a.png --bold\n" in shown
    assert "Options of the size:" in shown and "Rate of the drawing. (type: float, default: 0.5)" in shown
    assert " ".join(shown.split()).count("Width in pixels. (type: PositiveInt, default: 3)") == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "files must be given."),
        ("a --widht 3", "--widht is not an option; did you mean --width?"),
        ("a --wid 3", "--wid is not an option; did you mean --width?"),
        ("a --with_hat 3", "--with_hat is not an option; `lrl draw --help` lists the options."),
        ("a --zzz=3", "--zzz is not an option; `lrl draw --help` lists the options."),
        ("a --width 0", "--width is 0; it must be at least 1."),
        ("a --width 9223372036854775808", f"--width is {2**63}; it must be less than {2**63}."),
        ("a --width x", "--width is 'x'; it must be an integer."),
        ("a --bounds 1 inf", "--bounds is 'inf'; it must be a number."),
        ("a --rate x", "--rate is 'x'; it must be a number."),
        ("a --bounds 1 x", "--bounds is 'x'; it must be a number."),
        ("a --names [1]", "--names is '[1]'; it must be a JSON object."),
        ("a --colour green", "--colour is 'green'; it must be one of red, blue."),
        ("a --rate", "--rate: expected one argument"),
    ],
)
def test_a_mistake_is_one_sentence(words, sentence, capsys):
    with pytest.raises(SystemExit) as end:
        parsed(words)
    assert end.value.code == 2 and capsys.readouterr().err == f"lrl draw: {sentence}\n"


@pytest.mark.parametrize(
    ("error", "sentence", "status"),
    [
        (ValueError("rate is 3; it must be 2."), "--rate is 3; it must be 2.", 2),
        (ValueError("model.rate is 3; it must be 2."), "model.rate is 3; it must be 2.", 2),
        (KeyboardInterrupt(), "interrupted", 130),
    ],
)
def test_an_error_of_the_library_names_the_option_of_its_setting(error, sentence, status, capsys):
    def fail(*, rate: float = 0.5) -> None:
        """Fail with an error of the library."""
        raise error

    with pytest.raises(SystemExit) as end:
        command(fail)("lrl fail", [])
    place = "" if status == 130 else " (test_command.py, line 119)."  # of the function, which is not part of lrl
    printed = re.sub(r"line \d+", "line 119", capsys.readouterr().err)
    assert end.value.code == status and printed == f"lrl fail: {sentence.removesuffix('.')}{place}\n"


def test_an_option_that_takes_one_word_each_time_may_stand_before_the_positional_arguments(capsys):
    def plot(files: list[str], *, line: tuple[str, ...] | None = None, out: str) -> None:
        """Plot files."""
        SEEN.append((files, line, out))

    SEEN.clear()
    command(plot)("lrl plot", ["--out", "x", "--line", "1", "--line", "2", "a", "b"])
    assert SEEN == [(["a", "b"], ("1", "2"), "x")]
    with pytest.raises(SystemExit):
        command(plot)("lrl plot", [])
    assert capsys.readouterr().err == "lrl plot: files and --out must be given.\n"


def test_other_words_are_collected_where_a_function_takes_them(capsys):
    def run(*options: str, count: int, name: str = "x") -> None:
        """Run with options of another program."""
        SEEN.append((options, count, name))

    SEEN.clear()
    command(run)("lrl run", ["--other.key", "3", "--count", "4", "--flag", "--name=y"])
    assert SEEN == [(("--other.key", "3", "--flag"), 4, "y")]
    with pytest.raises(SystemExit):
        command(run)("lrl run", ["--count"])
    assert capsys.readouterr().err == "lrl run: --count: expected one argument\n"
