"""Build the gallery page: run every script, save its figure, and write index.md from its docstring and its output.

    OMP_NUM_THREADS=1 python docs/gallery/make.py

The page contains the output of this run; a test runs the scripts, whose assertions check the results.
"""

from __future__ import annotations

import ast
import contextlib
import io
import runpy
from pathlib import Path

HERE = Path(__file__).parent
FIGURES = HERE / "figures"
ORDER = [
    "digits_image",
    "breast_cancer_table",
    "curve_cnn",
    "large_image",
    "gpt2_arithmetic",
    "bert_negation",
    "sigma_sweep",
    "neuron",
    "softplus_hessian",
    "attack",
]
HEAD = """# Gallery

These scripts run as they stand, in seconds on one CPU core, and check their results: each raises an error if a
statement does not hold. They need `pip install 'smoothhess[demo]'`, those of transformers also
`pip install transformers`.

> The intervals are the Monte-Carlo error of one network's smoothed Hessian. They do not say whether an interaction is
> real, stable or causal.
"""
SECTION = """
## {title}

{words}

![{title}](figures/{name}.png)

It prints

```
{printed}
```

<details><summary>The script, <code>{name}.py</code></summary>

```{{literalinclude}} {name}.py
:language: python
```

</details>
"""


def described(name: str) -> tuple[str, str]:
    """Title and paragraphs of a script's docstring."""
    text = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))) or ""
    title, _, words = text.partition("\n\n")
    return title.rstrip("."), words


def run(name: str) -> str:
    """What a script prints; its figure goes to FIGURES."""
    printed = io.StringIO()
    with contextlib.chdir(FIGURES), contextlib.redirect_stdout(printed):
        runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
    return printed.getvalue().rstrip()


def page(printed: dict[str, str]) -> str:
    """The page, from what each script printed."""
    sections = []
    for name in ORDER:
        title, words = described(name)
        sections.append(SECTION.format(name=name, title=title, words=words, printed=printed[name]))
    return HEAD + "".join(sections)


def main() -> None:
    """Run all scripts and write the page."""
    FIGURES.mkdir(exist_ok=True)
    (HERE / "index.md").write_text(page({name: run(name) for name in ORDER}), encoding="utf-8")


if __name__ == "__main__":
    main()
