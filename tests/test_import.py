"""`import hf_speculate` stays light: nothing is loaded before it is used."""

import subprocess
import sys

import hf_speculate

HEAVY = ("rich", "typer", "jinja2", "huggingface_hub.hf_api", "matplotlib", "transformers", "torch")


def test_importing_the_package_loads_no_library_and_enabling_a_model_no_tools():
    code = (
        "import sys, hf_speculate\n"
        "print([name for name in sys.modules if name.startswith('hf_speculate.')])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
        "hf_speculate.enable, hf_speculate.generate\n"
        "print([name for name in sys.modules if name.startswith(('hf_speculate.tools', 'typer', 'matplotlib'))])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n" * 3


def test_dir_shows_the_public_names_and_each_can_be_imported():
    assert dir(hf_speculate) == sorted([*hf_speculate.__all__, "__version__"])
    for name in hf_speculate.__all__:
        assert getattr(hf_speculate, name).__module__.startswith("hf_speculate.")
