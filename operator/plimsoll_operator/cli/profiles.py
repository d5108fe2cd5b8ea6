"""What was learned of a deployment's model on its device: its MemoryProfile, read from the cluster.

In: a server and a :class:`View`. Out: what the profile says and its name; nothing where there is
none, or where it may not be read.
"""

from __future__ import annotations

from typing import Any

from plimsoll_operator import names
from plimsoll_operator.cli.server import Forbidden, NotFound, Server
from plimsoll_operator.cli.view import View
from plimsoll_operator.resources import MEMORY_PROFILE, STATEFUL_SET
from plimsoll_operator.tuning.profile import profile_key, read_learned
from plimsoll_operator.tuning.values import Learned

Json = dict[str, Any]


def find_learned(server: Server, view: View) -> tuple[Learned | None, str | None]:
    """The name is None when nobody can tell which profile it is: the engine's image is part of its
    key, and only the StatefulSet has the operator's default."""
    if view.deployment is None:
        return None, None
    image = view.deployment.image or _image(server, view)
    if image is None:
        return None, None
    key = profile_key(view.deployment, image)
    try:
        profile = server.get(MEMORY_PROFILE.path(view.namespace, key.name))
    except (NotFound, Forbidden):
        return None, key.name
    return read_learned(profile), key.name


def _image(server: Server, view: View) -> str | None:
    try:
        body = server.get(STATEFUL_SET.path(view.namespace, view.name))
    except (NotFound, Forbidden):
        return None
    spec = body["spec"]["template"]["spec"]
    containers = (*spec["containers"], *spec.get("initContainers", ()))
    return next((str(c["image"]) for c in containers if c["name"] == names.ENGINE_CONTAINER), None)
