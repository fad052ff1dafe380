"""Tests of the cache of responses."""

import multiprocessing
import os
import signal
import sqlite3
import time

import pytest

from lrl.chat.cache import CompletionCache, request_key
from lrl.chat.model import Completion


def completion(text):
    return Completion(text=text, finish_reason="stop", prompt_tokens=3, completion_tokens=1)


def test_a_response_is_read_back_unchanged_and_the_first_one_is_kept(tmp_path):
    cache, other = (CompletionCache(tmp_path / "c.sqlite") for _ in range(2))
    assert cache.find("k") is None
    assert cache.add("k", "m", completion("first")).text == "first"
    assert other.add("k", "m", completion("second")).text == "first"  # the first response is kept and returned
    found = other.find("k")
    assert (found.text, found.prompt_tokens, found.cached, len(cache)) == ("first", 3, True, 1)
    cache.close()
    assert cache.find("k").text == "first"
    cache.close()
    other.close()


def test_keys_do_not_depend_on_the_order_of_fields():
    assert request_key("u", {"a": 1, "b": 2}, 3) == request_key("u", {"b": 2, "a": 1}, 3)
    others = [("u", {"a": 1}, 3), ("v", {"a": 1}, 3), ("u", {"a": 2}, 3), ("u", {"a": 1}, 4)]
    assert len({request_key(*other) for other in others}) == 4


def test_keys_stay_the_same_so_that_stored_responses_are_found_again():
    body = {"model": "m", "messages": [{"role": "user", "content": "où? \ud800"}], "temperature": 0.5}
    assert request_key("http://host/v1", body, 7) == "77713a70c1d59ddbbb6c89db8a195acb94b4a4cbdec424aff2e8824c165ed980"


def test_sampling_that_is_not_a_number_has_no_key():
    with pytest.raises(ValueError, match="not JSON compliant"):
        request_key("u", {"temperature": float("nan")}, 0)


def test_a_response_with_text_replaces_an_empty_one(tmp_path):
    cache = CompletionCache(tmp_path / "c.sqlite")
    assert [cache.add("k", "m", completion(text)).text for text in (" \n", "", "go", "stay", "")] == [
        " \n", " \n", "go", "go", "go",
    ]  # fmt: skip
    cut = Completion(text="", finish_reason="length", prompt_tokens=3, completion_tokens=9)
    assert cache.add("cut", "m", cut) == cut and cache.add("cut", "m", completion("go")).text == ""
    cache.close()


def write(path, name, count, written):
    """Write responses, and send the number of responses after each."""
    cache = CompletionCache(path)
    for n in range(count):
        cache.add(f"{name} {n}", "m", completion(f"{n} " * 500))
        written.value = n + 1


@pytest.mark.slow
def test_responses_are_complete_if_several_processes_write_and_one_is_killed(tmp_path):
    path, count, context = tmp_path / "c.sqlite", 20, multiprocessing.get_context("fork")
    said = {name: context.Value("i", 0, lock=False) for name in ("victim", "a", "b")}
    children = {
        name: context.Process(target=write, args=(path, name, 10**6 if name == "victim" else count, written))
        for name, written in said.items()
    }
    for child in children.values():
        child.start()
    while said["victim"].value < 5:
        time.sleep(0.001)
    os.kill(children["victim"].pid, signal.SIGKILL)
    for child in children.values():
        child.join()
    assert [child.exitcode for child in children.values()] == [-signal.SIGKILL, 0, 0]
    cache = CompletionCache(path)
    for name, written in said.items():
        assert all(cache.find(f"{name} {n}").text == f"{n} " * 500 for n in range(written.value))
    total = sum(written.value for written in said.values())
    assert said["a"].value == said["b"].value == count and len(cache) in (total, total + 1)
    cache.close()


@pytest.mark.parametrize("kind", ["text", "database", "newer", "folder"])
def test_a_file_of_another_program_raises_and_is_not_changed(tmp_path, kind):
    path = tmp_path / "c.sqlite"
    if kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("a plain text, longer than the header of a database " * 9)
    else:
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version = 99" if kind == "newer" else "CREATE TABLE mine (x)")
        connection.commit()
        connection.close()
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(
        ValueError, match=r"c.sqlite', which cannot be used .* it must be a new file or one that lrl wrote"
    ):
        CompletionCache(path)
    assert not before or path.read_bytes() == before


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("query_only = 1", "cache is '{}', which cannot be used (attempt to write a readonly database);"),
        ("max_page_count = 1", "there is no space left on the disk for the cache '{}', to which the response was not"),
    ],
)
def test_the_error_for_a_file_that_cannot_be_written_states_the_reason(tmp_path, limit, said):
    """Limits of SQLite raise the errors of a read-only file system and of a full disk."""
    cache = CompletionCache(tmp_path / "c.sqlite")
    cache.add("first", "m", completion("kept"))
    cache._connection.execute(f"PRAGMA {limit}")
    with pytest.raises(ValueError) as caught:
        cache.add("second", "m", completion("long " * 9999))
    assert str(caught.value).startswith(said.format(cache.path))
    cache.close()
    assert cache.find("first").text == "kept"
    cache.close()


def test_a_file_that_another_process_has_locked_raises(tmp_path, monkeypatch):
    monkeypatch.setattr("lrl.chat.cache._BUSY_TIMEOUT", 0.01)
    cache, other = CompletionCache(tmp_path / "c.sqlite"), sqlite3.connect(tmp_path / "c.sqlite")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(ValueError, match=r"c.sqlite', which cannot be used \(database is locked\)"):
        cache.add("first", "m", completion("kept"))
    other.close()
    cache.close()


def test_a_folder_that_cannot_be_created_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"c.sqlite', which cannot be used .*file"):
        CompletionCache(tmp_path / "file" / "c.sqlite")
    with pytest.raises(ValueError, match=r"xxx', which cannot be used"):
        CompletionCache(tmp_path / ("x" * 300))
