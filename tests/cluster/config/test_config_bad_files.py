"""Files that are no config at all: one sentence each, at once, never a traceback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.config.find import FILE_VARIABLE, find_config
from cluster.config.loader import load_config
from cluster.errors import ConfigError
from tests.cluster.config.config_files import mistakes, places, write
from tests.pace import loops

DEEP = 10_000
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)

WHOLE_FILES = {
    "empty": (b"", "is empty"),
    "comments only": (b"# nothing\n\n", "is empty"),
    "null only": (b"---\n", "is empty"),
    "list on top": (b"- cluster\n", "holds a list at its top"),
    "scalar on top": (b"hello\n", "holds one value at its top"),
    "tab indent": (b"cluster:\n\tname: demo\n", "a tab is used where YAML wants spaces"),
    "tab first": (b"\tcluster: {}\n", "a tab is used where YAML wants spaces"),
    "flow lists": (b"[" * DEEP, "nested more than 50 levels"),
    "closed flow lists": (b"cluster: " + b"[" * DEEP + b"]" * DEEP, "nested more than 50 levels"),
    "flow mappings": (b"{a: " * DEEP, "nested more than 50 levels"),
    "block lists": (b"- " * DEEP + b"x", "nested more than 50 levels"),
    "nested keys": (b"? " * DEEP + b"x", "nested more than 50 levels"),
    "lists over lines": (b"[\n" * DEEP, "nested more than 50 levels"),
    "block mappings": (
        b"".join(b" " * depth + b"a:\n" for depth in range(1400)),
        "nested more than 50 levels",
    ),
    "random bytes": (bytes(range(256)), "is not UTF-8 text"),
    "an executable": (b"\x7fELF\x02\x01\x01\x00" + b"\x00" * 100, "holds the control character U+007F"),
    "nul bytes": (b"cluster: {}\n\x00", "holds the control character U+0000"),
    "latin-1": ("cluster: {name: é}".encode("latin-1"), "the byte 0xe9"),
    "utf-16": ("cluster: {}".encode("utf-16"), "is not UTF-8 text"),
    "two documents": (b"cluster: {}\n---\ncluster: {}\n", "more than one YAML document"),
    "billion laughs": (LAUGHS.encode(), "expand to more than"),
    "alias of itself": (b"cluster: &a [*a]\n", "inside of its own anchor"),
    "alias of nothing": (b"cluster: *a\n", "has no anchor `&a`"),
    "larger than 1 MiB": (b"#" * (1024 * 1024 + 1), "larger than 1048576 bytes"),
    "one endless line": (b"a: " + b"!" * 1_000_000, "has a line of 1000003 characters"),
    "many lines": (b"a\n" * 500_000, "lines; a config has at most"),
    "many values": (b"[" + (b"a," * 40_000 + b"\n") * 10, "more than 20000 keys and values"),
    "open bracket": (b"cluster: [1, 2\n", "a `,` or the closing `]` is missing"),
    "open brace": (b"cluster: {name: x\n", "a `,` or the closing `}` is missing"),
    "open quote": (b'cluster: "x\n', "a quote is opened and not closed"),
    "bad escape": (b'cluster: "\\UFFFFFFFF"\n', "malformed escape"),
    "at sign": (b"cluster: @x\n", "needs quotes"),
    "second colon": (b"cluster: a: b\n", "a second `:`"),
    "bad indentation": (b"cluster:\n  name: x\n nodes: []\n", "does not fit the ones above"),
    "future YAML": (b"%YAML 9.9\n---\ncluster: {}\n", "is not YAML"),
}


@pytest.mark.parametrize("name", WHOLE_FILES)
def test_a_file_that_is_no_config_gets_one_sentence_at_once(name: str, tmp_path: Path) -> None:
    content, words = WHOLE_FILES[name]
    path = write(tmp_path, content)

    with pytest.raises(ConfigError) as raised:
        load_config(path)

    (mistake,) = raised.value.mistakes
    assert words in mistake.message
    assert mistake.file == str(path)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("name", WHOLE_FILES)
def test_a_file_that_is_no_config_is_refused_at_once(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, WHOLE_FILES[name][0])

    def refuse() -> None:
        with pytest.raises(ConfigError):
            load_config(path)

    # The dearest, as many values as a config may have, takes 25; its file has twenty times as many.
    assert loops(refuse, tries=1) < 55


def test_places_of_what_is_no_yaml_are_exact(tmp_path: Path) -> None:
    assert places(mistakes(tmp_path, "cluster: {}\n# ü\nx: [1,\n")) == [(4, 1, "")]
    assert places(mistakes(tmp_path, "cluster: {}\n---\na: 1\n")) == [(2, 1, "")]
    assert places(mistakes(tmp_path, "cluster:\n  name: ü\x01\n")) == [(2, 10, "")]
    assert places(mistakes(tmp_path, "cluster:\n  näme: ".encode() + b"\xff\n")) == [(2, 9, "")]
    assert places(mistakes(tmp_path, "cluster:\n\tname: x\n")) == [(2, 1, "")]


def test_a_missing_file_names_the_command_that_writes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: there is no such file; `shoal init` writes one"):
        load_config(tmp_path / "nothing.yaml")


def test_a_directory_is_no_config_but_the_one_inside_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a directory; name a file"):
        load_config(tmp_path)
    write(tmp_path, "cluster: {}\n")
    with pytest.raises(ConfigError, match=r"is a directory; did you mean .*shoal\.yaml\?"):
        load_config(tmp_path)


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a regular file"):
        load_config(tmp_path / "pipe")


def test_a_file_inside_of_a_file_cannot_be_read(tmp_path: Path) -> None:
    path = write(tmp_path, "cluster: {}\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path / "shoal.yaml")


def test_a_name_with_a_nul_is_no_file_name() -> None:
    with pytest.raises(ConfigError, match="no name a file can have"):
        load_config(Path("a\0b"))


def test_an_unreadable_file_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    path = write(tmp_path, "cluster: {}\n")
    path.chmod(0)
    # Root reads everything, so the test is another user for a moment; the directories above stay root's.
    descriptor = os.open(tmp_path, os.O_RDONLY)
    here = Path.cwd()
    os.fchdir(descriptor)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match=r"shoal\.yaml: cannot be read \(Permission denied\)"):
            load_config(Path("shoal.yaml"))
    finally:
        if is_root:
            os.seteuid(0)
        os.chdir(here)
        os.close(descriptor)


def test_the_file_is_found_here_or_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    with pytest.raises(ConfigError, match=r"no such file here or in a parent directory"):
        find_config()
    above = write(tmp_path, "cluster: {}\n")
    assert find_config() == above
    here = write(deep, "cluster: {}\n")
    assert load_config(find_config()).path == here


def test_the_argument_counts_before_the_environment_before_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "cluster: {}\n")
    monkeypatch.setenv(FILE_VARIABLE, "from-environment.yaml")
    assert find_config("argument.yaml") == Path("argument.yaml")
    assert find_config() == Path("from-environment.yaml")
    monkeypatch.setenv(FILE_VARIABLE, "")
    assert find_config() == Path("shoal.yaml")
