"""Runs `smoothhess explain`: reads the settings, explains the inputs one by one, and writes their files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from smoothhess.cli.explain import (
    image_files,
    inputs,
    load_model,
    output_files,
    printed_summary,
    target_class,
    token_files,
)
from smoothhess.cli.explain.checked_settings import Settings
from smoothhess.cli.explain.example_question import Question, ask, key
from smoothhess.cli.explain.inputs import Reading
from smoothhess.cli.explain.load_model import Model
from smoothhess.cli.explain.normalization import read_numbers
from smoothhess.cli.explain.option_values import parse_size
from smoothhess.cli.explain.output_folder import INDEX, Folder
from smoothhess.cli.printable_text import one_line
from smoothhess.explainers.progress import Progress
from smoothhess.explainers.smooth_hess import SmoothHess
from smoothhess.result.effect_sizes import size_sentence
from smoothhess.result.interactions import Interactions
from smoothhess.result.shown_estimate import shown_error
from smoothhess.result.text import LIMITS
from smoothhess.view.captions import noise_sentence
from smoothhess.view.figures import canvas


def run(settings: Settings, say: Callable[[str], object] = printed_summary.say) -> list[Path]:
    """Explain every input, print the strongest pairs, and write pages, figures, tables and results.

    The files of an input are moved to the output folder when all of them are written. Finished inputs are kept, so that
    the same command resumes after an interruption. Files that no earlier run wrote are never replaced.

    Args:
        settings: The options of the command line, after `Settings.check`.
        say: Function that prints one string.

    Returns:
        The paths of the pages.

    Raises:
        ValueError: If an option, a file or the model cannot be used.
        ImportError: If matplotlib is not installed.
    """
    canvas.new_figure(1, 1)  # raises at once where matplotlib is missing
    device = _device(settings.device)
    folder = Folder(settings.out)
    classes = target_class.read_classes(settings.classes)
    reading = Reading(
        size=None if settings.size is None else image_files.check_size(parse_size(settings.size)),
        rows=settings.rows,
        drop=settings.drop,
        standardize=settings.standardize,
        batched=settings.batched,
        step=settings.step,
        mean=read_numbers(settings.mean, "--mean"),
        deviation=read_numbers(settings.std, "--std"),
    )
    texts = token_files.read(settings.tokens, settings.names)
    model = load_model.load(settings.model, settings.weights, settings.output, device, settings.seed)
    if settings.layer is None:
        found = inputs.read(settings.inputs, model, reading, device)
    else:
        found = inputs.of_texts(texts, model, settings.layer, settings.baseline, device)
    asked = [ask(example, settings, classes, device) for example in found]
    notes = [*model.notes, *(n for question in asked for n in question.example.notes)]
    notes += [f"one unit of a feature is {q.example.units}" for q in asked if q.example.units]
    for note in dict.fromkeys(notes):
        say(printed_summary.wrapped(f"note: {note}"))
    with folder.opened():
        names = _explain_all(asked, model, folder, device, say)
    say(printed_summary.wrapped(printed_summary.READING))
    say(printed_summary.wrapped(f"Limits: {LIMITS}"))
    first = INDEX if len(names) > 1 else f"{names[0]}.html"
    say(f"\nWritten: open {folder.path / first}")
    return [folder.path / f"{name}.html" for name in names]


def _explain_all(
    asked: Sequence[Question], model: Model, folder: Folder, device: torch.device, say: Callable[[str], object]
) -> list[str]:
    """Explain the examples one by one and return their names; the files of finished ones are kept."""
    keys = [key(question, model) for question in asked]
    for question, made_with in zip(asked, keys, strict=True):
        if folder.kept(question.example.name, made_with) is None:
            folder.refuse_foreign(output_files.names(question))
    if len(asked) > 1:
        folder.refuse_foreign([INDEX])
    finished: list[str] = []
    try:
        with Progress(None, len(asked), "explain", "inputs") if len(asked) > 1 else nullcontext() as bar:
            for question, made_with in zip(asked, keys, strict=True):
                _answer(question, made_with, model, folder, device, say)
                finished.append(question.example.name)
                if bar is not None:
                    bar.update()
    except KeyboardInterrupt:
        if not finished:
            say("no input is finished; rerun the same command to start again.")
        raise
    finally:  # also after Ctrl-C: finished inputs are kept and listed
        if len(finished) > 1:
            title = f"Which features act together in {model.title}"
            folder.write_index(printed_summary.index(title, [(n, folder.records[n]) for n in finished]))
        if finished and len(finished) < len(asked):
            say(
                f"{len(finished)} of {len(asked)} inputs are finished, in {folder.path}; rerun the same command to "
                "resume."
            )
    return finished


def _answer(
    question: Question,
    made_with: str,
    model: Model,
    folder: Folder,
    device: torch.device,
    say: Callable[[str], object],
) -> None:
    """Explain one example and write its files, or keep the files of an earlier run."""
    example = question.example
    if (kept := folder.kept(example.name, made_with)) is not None:
        lines = [one_line(kept.words[k]) for k in ("strongest", "quality") if k in kept.words]
        say("\n  ".join([question.heading, *lines, "kept from an earlier run with the same settings\n"]))
        return
    result, remarks = _attribute(question, device)
    remarks += output_files.left_out(result, example.name)
    pairs = result.top_pairs(printed_summary.PAIRS, question.labels)[0]
    lines = [question.heading, printed_summary.table(pairs), f"  {printed_summary.quality(result)}"]
    if sentence := noise_sentence(result, example.kind):
        lines.append(printed_summary.wrapped(sentence, "  "))
    lines += [printed_summary.wrapped(f"note: {r}", "  ") for r in remarks]
    strongest = "none"
    if pairs:
        strongest = f"{' × '.join(pairs[0].names)}: effect {pairs[0].effect:+.3g}, {size_sentence(pairs[0])}"
    words = {
        "title": example.title,
        "target": f"{question.target.name} ({question.output:.3g})",
        "strongest": strongest if not pairs or pairs[0].significant else f"{strongest} (not significant)",
        "quality": printed_summary.quality(result),
    }
    with folder.writing(example.name, made_with, words) as place:
        output_files.write(question, result, model, place, remarks)
    say("\n".join(lines) + "\n")  # printed only after the files exist


def _attribute(question: Question, device: torch.device) -> tuple[Interactions, list[str]]:
    """Return the result on the CPU, and the warnings about it as notes."""
    example = question.example
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values, target, options = example.values[None].to(device), question.target.index, question.options
        if example.gates is not None:
            named = {"names": example.names, "classes": question.classes}
            result = example.gates.attribute(values, target, **named, **options)
        else:
            mask = None if question.segments is None else question.segments.mask.to(device)
            named = {"feature_mask": mask, "names": question.names, "classes": question.classes}
            result = SmoothHess(example.forward_func).attribute(values, target, **named, **options)
    remarks = [
        str(w.message)
        .replace("1 of 1 example(s): ", "")
        .replace("max_calls=", "--max-calls ")
        .replace("max_calls", "--max-calls")
        for w in caught
        if issubclass(w.category, UserWarning)
    ]
    if float(shown_error(result)[0]) > 1:
        remarks.append(
            "the error of the estimate is larger than the interactions, which are therefore not reliable. Use more "
            "calls, fewer and larger groups, or a larger --sigma or --radius"
        )
    return result.to("cpu"), list(dict.fromkeys(remarks))


def _device(words: str | None) -> torch.device:
    try:
        device = torch.device(words or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {words} cannot be used here: {str(error).splitlines()[0]}") from error
    return device
