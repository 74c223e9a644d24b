"""What is kept back of other packages' remarks, and what is not."""

import logging

import pytest

from hf_speculate.tools.cli import logging as quiet


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["/usr/bin/python", "/usr/local/bin/hf-speculate", "check", "a", "b"], True),
        (["python.exe", "hf-speculate.exe"], True),
        (["python", "-u", "-m", "hf_speculate.tools.cli.main", "batch"], True),
        (["python", "serve.py"], False),
        (["python", "-c", "import hf_speculate.tools.cli.main"], False),
        (["python", "-m", "pytest"], False),
    ],
)
def test_only_the_command_keeps_remarks_back(words, expected):
    assert quiet.is_command(words) is expected


def test_errors_and_other_loggers_are_heard(monkeypatch, caplog):
    monkeypatch.setattr(quiet, "REMARKING", ("a_stranger",))
    quiet.keep_remarks_back()
    for name in ("a_stranger", "a_stranger.part", "hf_speculate.engine.decoder"):
        logging.getLogger(name).warning("a remark of %s", name)
    logging.getLogger("a_stranger").error("an error")
    assert caplog.messages == ["a remark of a_stranger.part", "a remark of hf_speculate.engine.decoder", "an error"]
