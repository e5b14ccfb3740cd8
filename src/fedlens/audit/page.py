"""The page of an audit: what was tried, what it found, and what that does not say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from fedlens.audit.membership import Measured, Membership, Roc
from fedlens.audit.reconstruction import Reconstruction, Training
from fedlens.report.blocks import Block, Curves, Facts, Line, Samples, Table, Text
from fedlens.report.numbers import NONE

ALARMS = 0.001, 0.01  # shares of false alarms at which an attack is judged
DELTA = 1e-5
POINTS = np.geomspace(1e-4, 1, 81)  # of a curve
RECOGNISED = 20.0  # decibels, from which on most people recognise a small image
CANARIES = {
    "client": "{} clients sent a known direction, or zeros, in place of an update",
    "example": "{} known gradients, longer than the clip, were among the examples of the client "
    "that spends most, or were not",
}
HEADER = "best PSNR, dB", "mean SSIM", "labels found"
SEEN = {
    None: "",
    "client": ", and it adds the noise itself: privacy of clients hides no upload from it",
    "example": ", and the client's noise is in what it gets",
}
NOTHING = "That these attacks found nothing does not mean that there is nothing to find."


def measured(found: Membership) -> dict[str, Any]:
    """The numbers of the membership attack, for JSON."""
    roc = found.roc()
    return {
        "shadows": len(found.member),
        "examples": len(found.labels),
        "epsilon_at_least": found.bound(DELTA),
        "area": roc.area,
        "area_without_shadows": found.roc(plain=True).area,
        **{f"found_at_{alarms:g}": roc.true_at(alarms) for alarms in ALARMS},
        "unseen_accuracy": float(found.accuracy.mean()),
    }


def rebuilt(found: Sequence[Reconstruction]) -> list[dict[str, Any]]:
    """The numbers of each reconstruction, for JSON."""
    return [
        {
            "training": None if one.training is None else asdict(one.training),
            "examples": len(one.labels),
            "psnr": one.psnr.tolist(),
            "ssim": one.ssim.tolist(),
            "labels_found": one.right_labels,
            "cosine": one.cosine,
        }
        for one in found
    ]


def verdict(claim: Measured) -> str:
    """What the canaries say of a run's claim."""
    said = f"claimed {claim.claimed:.2f}, measured at least {claim.at_least:.2f}"
    return said if claim.holds else f"{said}: the run is NOT as private as it claims"


def blocks(
    membership: Membership,
    found: Sequence[Reconstruction],
    classes: Sequence[str],
    claim: Measured | None,
    bare: Membership | None = None,
) -> list[Block]:
    """The page's blocks, most important first. `bare` is of the same runs without [privacy]."""
    return [
        *([] if claim is None else [_of_claim(claim)]),
        *_of_members(membership, bare, classes),
        *(_of_images(found, None if claim is None else claim.unit) if found else ()),
        Text(
            title="What this does not say",
            paragraphs=[
                f"{NOTHING} A stronger attacker, with more shadow runs, with every model of the "
                "run, or with data of its own, may find more. Only a guarantee of differential "
                "privacy bounds all attackers, of its unit and with its ε.",
            ],
        ),
    ]


def _of_claim(claim: Measured) -> Block:
    return Facts(
        title="Does the claim hold?",
        caption=f"{CANARIES[claim.unit].format(claim.canaries)}; of {claim.guesses} guesses which "
        f"it was, {claim.right} were right. What was measured is a bound of this attack, with 95% "
        "confidence.",
        facts={f"ε of one {claim.unit}": verdict(claim)},
    )


def _of_members(
    membership: Membership, bare: Membership | None, classes: Sequence[str]
) -> list[Block]:
    roc = membership.roc()
    lines = [
        _curve("with shadow runs", roc),
        _curve("without shadow runs", membership.roc(plain=True)),
        Line("by chance", POINTS.tolist(), POINTS.tolist(), style="dotted"),
    ]
    facts = {
        "found at 0.1% false alarms": f"{100 * roc.true_at(0.001):.2f}%",
        "found at 1% false alarms": f"{100 * roc.true_at(0.01):.2f}%",
        "area, 0.5 by chance": f"{roc.area:.3f}",
        "ε of an example, at least": f"{membership.bound(DELTA):.2f}",
        "shadow runs": f"{len(membership.member)}",
        "examples": f"{len(membership.labels):,}",
    }
    if bare is not None:
        alone = bare.roc()
        lines.insert(1, _curve("the same without [privacy]", alone))
        facts["area, without [privacy]"] = f"{alone.area:.3f}"
    return [
        Facts(
            title="Who was in the training data?",
            caption="Each shadow run has half of the examples, so one that protects examples draws "
            "each of them more often. The bound of ε is of these runs, with 95% confidence, for "
            "δ = 1e-5 (Steinke et al., 2023).",
            facts=facts,
        ),
        Curves(
            title="Members found against false alarms",
            caption="The attack has the model's confidence in an example's label. With shadow runs "
            "it knows how confident such a model is if it was trained on the example, and if not. "
            f"{NOTHING}",
            lines=lines,
            x_label="share of false alarms",
            y_label="share of members found",
            log_x=True,
            log_y=True,
        ),
        Table(
            title="By class",
            caption="At 1% false alarms within the class.",
            header=["class", "examples", "found", "area"],
            rows=_rows(membership, membership.labels, classes),
            folded=True,
        ),
        Table(
            title="By client",
            caption="At 1% false alarms within the client's examples.",
            header=["client", "examples", "found", "area"],
            rows=_rows(membership, membership.clients),
            folded=True,
        ),
    ]


def _of_images(found: Sequence[Reconstruction], unit: str | None) -> list[Block]:
    own = [one for one in found if one.training is None]
    changed = [(one, one.training) for one in found if one.training is not None]
    return [
        Table(
            title="Images from one client's upload",
            caption=f"From a signal-to-noise ratio (PSNR) of about {RECOGNISED:g} dB on, or a "
            "structural similarity (SSIM) near 1, an image is recognised at once; outlines show "
            f"long before. The attacker is the server, in the first round{SEEN[unit]}.",
            header=["images", *HEADER],
            rows=[[len(one.labels), *_numbers(one)] for one in own],
        ),
        Samples(
            title="Originals, and what came back",
            caption="Of each pair of rows the second was computed from the client's upload alone.",
            rows=[
                (f"of {len(one.labels)}: {what}", [_pixels(image) for image in images[:8]])
                for one in own
                for what, images in (("originals", one.originals), ("found", one.found))
            ],
        ),
        Table(
            title="What hides images",
            caption="The same client and model, but other training: one thing at a time is changed "
            "in a step of plain SGD on one image. Clip and noise are those of DP-SGD "
            '(unit = "example").',
            header=["images", "steps", "clip", "noise", *HEADER],
            rows=[
                [
                    how.examples,
                    how.steps,
                    NONE if how.clip is None else f"{how.clip:g}",
                    f"{how.noise:g}",
                    *_numbers(one),
                ]
                for one, how in changed
            ],
        ),
        Samples(
            title="What came back with other training",
            caption="In the order of the table: up to eight images of each upload.",
            rows=[
                (_name(how), [_pixels(image) for image in one.found[:8]]) for one, how in changed
            ],
        ),
    ]


def _numbers(one: Reconstruction) -> list[str]:
    return [
        f"{float(one.psnr.max()):.1f}",
        f"{float(one.ssim.mean()):.3f}",
        f"{one.right_labels} of {len(one.labels)}",
    ]


def _name(how: Training) -> str:
    """What is changed."""
    if how.noise:
        return f"noise {how.noise:g}"
    if how.clip is not None:
        return f"clip {how.clip:g}"
    return f"{how.steps} steps" if how.steps > 1 else f"of {how.examples}"


def _curve(name: str, roc: Roc) -> Line:
    return Line(name, POINTS.tolist(), [roc.true_at(alarms) or None for alarms in POINTS])


def _rows(found: Membership, group: Any, names: Sequence[str] | None = None) -> list[list[Any]]:
    rows = []
    for one in np.unique(group)[:100].tolist():
        which = group == one
        roc = found.roc(which)
        name = one if names is None else names[one]
        rows.append([name, int(which.sum()), f"{100 * roc.true_at(0.01):.1f}%", round(roc.area, 3)])
    return rows


def _pixels(image: Any) -> Any:  # [H, W] or [H, W, 3] uint8
    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    return pixels[..., :3] if pixels.shape[2] >= 3 else pixels[..., 0]
