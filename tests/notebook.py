"""Execute the cells of a notebook and save their outputs.

    python -m tests.notebook    # writes the outputs of examples/tutorial.ipynb anew

As in Jupyter, cells run in order, in one namespace and in the notebook's folder. The output of a
cell is its printed text and the value of its last expression. A cell with the tag `times` prints
seconds, so its output differs between runs.
"""

import ast
import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

TUTORIAL = Path(__file__).resolve().parents[1] / "examples" / "tutorial.ipynb"


def read(path: Path = TUTORIAL) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def execute(notebook: dict[str, Any], folder: Path) -> list[list[dict[str, Any]]]:
    """Return the outputs of each code cell."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(folder):
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        return [
            _run("".join(cell["source"]), names, number)
            for number, cell in enumerate(cells, start=1)
        ]


def _run(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        shown = {
            "output_type": "execute_result",
            "execution_count": number,
            "metadata": {},
            "data": _data(value),
        }
        outputs.append(shown)
    return outputs


def _data(value: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "savefig"):
        picture = io.BytesIO()
        value.savefig(picture, format="png", dpi=60)
        data["image/png"] = base64.b64encode(picture.getvalue()).decode()
    return data


def main() -> None:
    notebook = read()
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, outputs) in enumerate(
        zip(cells, execute(notebook, TUTORIAL.parent), strict=True), start=1
    ):
        cell |= {"execution_count": number, "outputs": outputs}
    TUTORIAL.write_text(json.dumps(notebook, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
