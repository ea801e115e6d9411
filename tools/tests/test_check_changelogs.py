"""A change of a package's code without an entry in its CHANGELOG is told, and may be mended by a later commit."""

import subprocess

import pytest

from checks.check_changelogs import NoHistory, check

CODE = "packages/dtensor/src/vescale_dtensor/it.py"
LOG = "packages/dtensor/CHANGELOG.md"
FIRST = '"""It."""\n\n\ndef it():\n    """Gives one."""\n    return 1\n'


@pytest.fixture
def repository(tmp_path):
    """commit(message, file=text, ...) in a new repository, whose first commit is tagged `begin`."""

    def git(*command):
        who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", tmp_path, *who, *command], check=True, capture_output=True)

    def commit(message, files):
        for file, text in files.items():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(text)
        git("add", "-A")
        git("commit", "-m", message)

    git("init")
    commit("begin", {CODE: FIRST, LOG: "## 0.1.0\n"})
    git("tag", "begin")
    commit.top = tmp_path
    return commit


def test_code_without_an_entry(repository):
    repository("it: two", {CODE: FIRST.replace("return 1", "return 2")})
    (finding,) = check(repository.top, "begin")
    assert finding.startswith(f"{LOG}: says nothing of ") and finding.endswith(" it: two")


def test_an_entry_in_the_same_commit_or_a_later_one(repository):
    repository("it: two", {CODE: FIRST.replace("return 1", "return 2"), LOG: "two\n"})
    assert list(check(repository.top, "begin")) == []
    repository("it: three", {CODE: FIRST.replace("return 1", "return 3")})
    assert len(list(check(repository.top, "begin"))) == 1
    repository("changelog", {LOG: "three\n"})
    assert list(check(repository.top, "begin")) == []


def test_an_entry_of_before_is_of_something_else(repository):
    repository("changelog", {LOG: "two\n"})
    repository("it: two", {CODE: FIRST.replace("return 1", "return 2")})
    assert len(list(check(repository.top, "begin"))) == 1


def test_words_alone_need_none(repository):
    repository("it: words", {CODE: FIRST.replace("Gives one.", "Returns one.").replace("return", "# why\n    return")})
    repository("tests", {"packages/dtensor/tests/test_it.py": "", "tools/it.py": ""})
    assert list(check(repository.top, "begin")) == []


def test_who_says_that_nothing_changed_for_anybody(repository):
    shorter = {CODE: FIRST.replace("return 1", "one = 1\n    return one")}
    repository("it: shorter\n\nChangelog: none, a name inside", shorter)
    assert list(check(repository.top, "begin")) == []


def test_a_file_that_is_new_or_gone(repository):
    repository("it: another", {CODE.replace("it.py", "other.py"): FIRST})
    assert len(list(check(repository.top, "begin"))) == 1


def test_without_history(repository):
    with pytest.raises(NoHistory):
        list(check(repository.top, "0123456789"))
