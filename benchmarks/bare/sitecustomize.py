"""Hides packages that a GPU machine's Python may lack: with this folder on PYTHONPATH they cannot be imported."""

from importlib.machinery import PathFinder

# Whatever neither the library nor transformers requires, and tests marked gpu must not need.
HIDDEN = {
    "PIL", "accelerate", "fastapi", "gguf", "hypothesis", "kernels", "matplotlib", "openai", "pandas", "peft",
    "playwright", "prometheus_client", "pyarrow", "ray", "sphinx", "torchao", "uvicorn", "xgrammar",
}  # fmt: skip

find_all = PathFinder.find_spec


def find_visible(cls, fullname, path=None, target=None):
    """The spec of a module; None for those of hidden packages."""
    return None if fullname.partition(".")[0] in HIDDEN else find_all(fullname, path, target)


# itself, because pytest calls it without looking at sys.meta_path
PathFinder.find_spec = classmethod(find_visible)
