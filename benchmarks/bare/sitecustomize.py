"""Hide packages that Python on a GPU machine may lack.

With this folder on PYTHONPATH, these packages cannot be imported.
"""

from importlib.machinery import PathFinder

# Neither the library nor transformers requires these packages, so tests marked gpu must run without
# them.
HIDDEN = {
    "PIL",
    "accelerate",
    "fastapi",
    "gguf",
    "hypothesis",
    "kernels",
    "matplotlib",
    "openai",
    "pandas",
    "peft",
    "playwright",
    "prometheus_client",
    "pyarrow",
    "ray",
    "sphinx",
    "torchao",
    "uvicorn",
    "xgrammar",
}

find_all = PathFinder.find_spec


def find_visible(cls, fullname, path=None, target=None):
    """Find the spec of a module; returns None for modules in hidden packages."""
    return None if fullname.partition(".")[0] in HIDDEN else find_all(fullname, path, target)


# The class itself is patched, because pytest calls it without consulting sys.meta_path.
PathFinder.find_spec = classmethod(find_visible)
