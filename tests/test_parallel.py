"""Test files in several processes: what passes, fails and kills its process is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked

FILES = {
    "test_good.py": """
        import os, pytest

        @pytest.fixture(scope="session")
        def once():
            yield os.getpid()
            print("torn down")

        @pytest.mark.parametrize("n", range(3))
        def test_same_process(once, n):
            assert once == os.getpid()

        def test_prints(once):
            print("of test_prints")
            assert once == 0
        """,
    "test_more.py": "def test_passes(): pass",
    "test_more_killed.py": """
        import os, signal

        def test_killed():
            os.kill(os.getpid(), signal.SIGKILL)
        """,
}


@pytest.mark.parametrize("more", [[], ["-x"]])
def test_what_is_reported(tmp_path: Path, more: list[str]) -> None:
    (tmp_path / "tests").mkdir()
    for name, text in FILES.items():
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        (tmp_path / "tests" / name).write_text("\n".join(line[indent:] for line in lines))
    arguments = ["-p", "tests.parallel", "--processes", "2", "-q", "-p", "no:cacheprovider"]
    options = [f"--rootdir={tmp_path}", f"--basetemp={tmp_path / 'temporary'}", *more]
    status, printed = forked.pytest(
        *arguments, *options, tmp_path / "tests", output=tmp_path / "output.txt"
    )
    assert status == 1
    if more:
        assert "stopping after 1 failures" in printed
    else:
        assert "2 failed, 4 passed" in printed
        assert "test_more_killed.py::test_killed" in printed
        assert "was killed by SIGKILL; its file was not finished" in printed
        assert "of test_prints" in printed and "assert once == 0" in printed
