"""Test the former name of the kernels package."""

import importlib

import pytest

from hf_speculate import kernels


def test_former_name_warns_and_gives_the_same_operations() -> None:
    with pytest.warns(DeprecationWarning, match="import hf_speculate.kernels"):
        former = importlib.import_module("hf_speculate.triton_kernels")
    assert {name: getattr(former, name) for name in kernels.__all__} == {
        name: getattr(kernels, name) for name in kernels.__all__
    }
