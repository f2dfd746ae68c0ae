"""The cyclopts command `smoothhess explain`: its options, their groups and their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from smoothhess.cli.early_interrupt import exit_during_imports
from smoothhess.cli.explain.checked_settings import Settings
from smoothhess.cli.explain.output_folder import Folder

MODEL = Group("Model", sort_key=1)
INPUT = Group("Inputs", sort_key=2)
TEXT = Group("Texts (in place of --input)", sort_key=3)
SCALE = Group("Scale of the noise (one of the two)", sort_key=4)
FEATURES = Group("Features", sort_key=5)
SAMPLING = Group("Sampling and output", sort_key=6)


def explain(
    *,
    model: Annotated[str, Parameter(group=MODEL)],
    input: Annotated[list[Path] | None, Parameter(group=INPUT, consume_multiple=True, negative="")] = None,
    tokens: Annotated[list[Path] | None, Parameter(group=TEXT, consume_multiple=True, negative="")] = None,
    names: Annotated[list[Path] | None, Parameter(group=TEXT, consume_multiple=True, negative="")] = None,
    layer: Annotated[str | None, Parameter(group=TEXT)] = None,
    baseline: Annotated[str, Parameter(group=TEXT)] = "mean",
    weights: Annotated[Path | None, Parameter(group=MODEL)] = None,
    output: Annotated[str | None, Parameter(group=MODEL)] = None,
    target: Annotated[str | None, Parameter(group=MODEL, allow_leading_hyphen=True)] = None,
    classes: Annotated[Path | None, Parameter(group=MODEL)] = None,
    mean: Annotated[list[str] | None, Parameter(group=MODEL, consume_multiple=True, negative="")] = None,
    std: Annotated[list[str] | None, Parameter(group=MODEL, consume_multiple=True, negative="")] = None,
    radius: Annotated[float | None, Parameter(group=SCALE)] = None,
    sigma: Annotated[float | None, Parameter(group=SCALE)] = None,
    size: Annotated[str | None, Parameter(group=INPUT)] = None,
    rows: Annotated[list[str] | None, Parameter(group=INPUT, consume_multiple=True, negative="")] = None,
    drop: Annotated[list[str] | None, Parameter(group=INPUT, consume_multiple=True, negative="")] = None,
    standardize: Annotated[bool, Parameter(group=INPUT)] = True,
    batched: Annotated[bool | None, Parameter(group=INPUT, negative="--single")] = None,
    segments: Annotated[str | None, Parameter(group=FEATURES)] = None,
    segments_noise: Annotated[Literal["pixels", "segments"], Parameter(group=FEATURES)] = "pixels",
    step: Annotated[float | None, Parameter(group=FEATURES)] = None,
    tol: Annotated[float | None, Parameter(group=SAMPLING, show_default=lambda _: "0.1")] = None,
    calls: Annotated[int | None, Parameter(group=SAMPLING)] = None,
    max_calls: Annotated[int | None, Parameter(group=SAMPLING)] = None,
    out: Annotated[Path, Parameter(group=SAMPLING)] = Path("smoothhess-explanation"),
    device: Annotated[str | None, Parameter(group=SAMPLING)] = None,
    seed: Annotated[int, Parameter(group=SAMPLING)] = 0,
) -> None:
    """Show which features of an input act together in your model: an interactive page, figures and tables.

    ```
    an image:  smoothhess explain --model net.pt2 --input cat.png --radius 5 --segments slic:50
    a table:   smoothhess explain --model mine.py:network --weights w.safetensors --input data.csv --sigma 0.25
    a curve:   smoothhess explain --model net.pt2 --input curve.npy --sigma 0.1 --segments window:0.5s --step 0.05
    a text:    smoothhess explain --model mine.py:network --tokens ids.npy --names tokens.txt --layer wte --sigma 0.1
    ```

    For each input NAME, the folder OUT contains NAME.html (the page), NAME-pairs.png and other figures, NAME.csv (the
    pairs with their intervals, up to 20 000; unit sd: features are in standard deviations of their columns) and
    NAME.safetensors (for smoothhess.Interactions.load); index.html lists the pages of several inputs.
    Finished inputs are kept: after an interruption, the same command resumes with the missing inputs.

    Args:
        model: file.pt2, written by torch.export.save(torch.export.export(model, (x,), dynamic_shapes=({0:
            torch.export.Dim.AUTO},)), "file.pt2") with two examples x; or pkg.module:factory or file.py:factory, a
            network, a function of a batch, or a callable without arguments that returns one of these; the current
            folder is searched as well. Pickled models (.pt, .pth) are rejected: opening one can run any code. Open only
            exports and code that you trust: an export can run code as well.
        input: One or more images (.png, .jpg, …; values 0 … 1), tables (.csv, .tsv with a header) and arrays (.npy, one
            example or several).
        tokens: One or more .npy files of token ids, one text or several of the same length. Each token has a gate, 1 at
            the token and 0 at the baseline, and SIGMA is the standard deviation of the gates.
        names: The tokens as strings, one file for each file of TOKENS: text with one token per line, or a json list.
        layer: Name of the embedding of the tokens in the network (named_modules), such as transformer.wte. An export
            (.pt2) has no layers: pass the network as file.py:factory.
        baseline: The embedding at gate 0: mean of all embeddings, zero, or the id of a token, such as a mask.
        weights: Weights for the factory's network: .safetensors, or a state dict in .pth or .pt.
        output: Which tensor to explain if the model returns several: a name (logits) or a number (0).
        target: Which output to explain: its number, its name in CLASSES, or comma-separated numbers for an output with
            several dimensions. Default: predicted, the largest output of each input, which is the predicted class.
        classes: Names of the outputs: a text file with one name per line, or a json file.
        mean: Mean for a model that takes normalised inputs: one number, one per channel or column (0.485,0.456,0.406),
            or a .npy file. The normalisation becomes part of the model, so that RADIUS and SIGMA are in the units of
            the file; for an image, relative to its range 0 … 1.
        std: Standard deviation for a model that takes normalised inputs, in the same forms as MEAN.
        radius: Typical length of the noise vector over all features: sigma = radius / √(features).
        sigma: Standard deviation of the noise in each feature: relative to the range of an image, in standard
            deviations of a column, in the units of an array, or of the gates of tokens.
        size: Resize images to this many pixels, 224 or HEIGHTxWIDTH. Without it, no image is resized.
        rows: Rows of a csv to explain, counted from 0 below the header: 0:5, 3, 1,4,7 or all. Default: the first 5.
        drop: Columns of a csv that the model does not take, such as the label.
        standardize: Measure the noise in a column in standard deviations of the column over all rows of the csv. The
            model still receives the numbers of the file. With --no-standardize, the noise is in units of the column.
        batched: Whether dimension 0 of .npy arrays is the batch dimension. Default: inferred from the input shapes that
            the model accepts.
        segments: Groups of features: slic:50 (super-pixels), grid:14 or grid:7x14, columns:groups.json (an object of
            lists of column names), window:0.5s or window:20 (samples), mask:file.png or .npy, none. Default: none up to
            256 features, else slic:50 for images and 20 windows for curves.
        segments_noise: What the noise shifts if there are groups. pixels: every pixel, sample or column independently;
            an interaction of two groups is then the sum over all pairs of their features. segments: all features of a
            group by the same shift; an interaction is then the effect of shifting both groups, and needs far fewer
            calls.
        step: Seconds between two samples of a curve.
        tol: Sample until the estimated relative error is this small. This is the error of the denoised matrix.
        calls: Sample with exactly this many gradients instead of a tolerance.
        max_calls: Stop after this many gradients of the model for an input, even if the tolerance is not reached; by
            default 20 000, and above 1 024 features one per feature.
        out: Output folder. Files in it that an earlier run did not write are never replaced.
        device: cpu, cuda, cuda:1, …. Default: a GPU if available.
        seed: Seed of the noise. The same seed gives the same numbers.
    """
    settings = Settings(
        model=model,
        inputs=input or (),
        tokens=tokens or (),
        names=names or (),
        layer=layer,
        baseline=baseline,
        weights=weights,
        output=output,
        target=target,
        classes=classes,
        radius=radius,
        sigma=sigma,
        segments=segments,
        segments_noise=segments_noise,
        step=step,
        mean=mean,
        std=std,
        size=size,
        rows=",".join(rows) if rows else None,
        drop=drop or (),
        standardize=standardize,
        batched=batched,
        tol=tol,
        calls=calls,
        max_calls=max_calls,
        out=out,
        device=device,
        seed=seed,
    )
    settings.check()
    Folder(settings.out)  # raises if it is not a folder of explanations
    with exit_during_imports():
        from smoothhess.cli.explain.run_explain import run
    run(settings)
