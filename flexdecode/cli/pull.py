"""`flexdecode pull ID`: puts a hub model into the local cache, and prints where it lies.

The progress bars on stderr are the hub library's own.
"""

from __future__ import annotations

from typing import Annotated

import typer

from flexdecode.cli.options import Json, Offline, Revision
from flexdecode.cli.output import write_json, write_text
from flexdecode.cli.verb import verb

NAME = "pull"
HELP = "Download a hub model into the local cache and print its directory."


@verb
def command(
    model_id: Annotated[
        str, typer.Argument(metavar="ID", help="A hub id, such as HuggingFaceTB/SmolLM2-135M-Instruct.")
    ],
    revision: Revision = None,
    offline: Offline = False,
    json: Json = False,
) -> None:
    if offline:
        raise ValueError(f"pull {model_id} needs the network, and --offline (or HF_HUB_OFFLINE) forbids it")
    from flexdecode.checkpoints.hub import pull

    path = pull(model_id, revision=revision)
    if json:
        write_json({"id": model_id, "revision": revision, "path": str(path)})
    else:
        write_text(f"{path}\n")
