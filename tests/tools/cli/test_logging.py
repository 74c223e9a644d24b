"""Warnings of other packages that the command hides, and those that it does not."""

import logging

from hf_speculate.tools.cli import main


def test_errors_and_other_loggers_are_shown(monkeypatch, caplog):
    monkeypatch.setattr(main, "_NOISY_LOGGERS", ("a_stranger",))
    main.quiet_other_packages()
    for name in ("a_stranger", "a_stranger.part", "hf_speculate.engine.decoder"):
        logging.getLogger(name).warning("a warning of %s", name)
    logging.getLogger("a_stranger").error("an error")
    assert caplog.messages == ["a warning of a_stranger.part", "a warning of hf_speculate.engine.decoder", "an error"]
