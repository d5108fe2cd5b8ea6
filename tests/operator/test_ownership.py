import copy
from typing import Any

import pytest

from plimsoll_operator.ownership import foreign_fields, is_owned, seized

Json = dict[str, Any]

POD = 'k:{"name":"engine"}'
# As the server keeps what the operator applies: leaves, and atomic parts as one leaf.
OWN: Json = {
    "f:metadata": {"f:labels": {"f:app": {}}},
    "f:spec": {
        "f:selector": {},
        "f:scratch": {"f:emptyDir": {}},
        "f:ports": {'k:{"port":80}': {".": {}, "f:name": {}, "f:port": {}}},
        "f:template": {
            "f:metadata": {"f:labels": {"f:app": {}}},
            "f:spec": {
                "f:containers": {
                    POD: {
                        ".": {},
                        "f:name": {},
                        "f:args": {},
                        "f:env": {'k:{"name":"A"}': {".": {}, "f:name": {}}},
                    }
                }
            },
        },
    },
}


def in_container(fields: Json) -> Json:
    return {"f:spec": {"f:template": {"f:spec": {"f:containers": {POD: fields}}}}}


def entry(fields: Json, manager: str = "kubectl-patch", **others: Any) -> Json:
    return {
        "manager": manager,
        "operation": "Update",
        "apiVersion": "v1",
        "fieldsType": "FieldsV1",
        "fieldsV1": copy.deepcopy(fields),
        **others,
    }


def owner() -> Json:
    return entry(OWN, "plimsoll-operator", operation="Apply")


def live(*entries: Json) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": "assistant",
            "namespace": "default",
            "uid": "uid-1",
            "resourceVersion": "7",
            "managedFields": list(entries),
        },
    }


ENV = in_container({"f:env": {'k:{"name":"FOO"}': {".": {}, "f:name": {}, "f:value": {}}}})
FOREIGN = {
    "a scalar": {"f:spec": {"f:sessionAffinity": {}}},
    "a map": {"f:spec": {"f:nodeSelector": {}}},
    "a map with itself": {"f:spec": {"f:affinity": {".": {}, "f:nodeAffinity": {}}}},
    "an entry of a list": ENV,
    "a field of an entry that is ours": in_container({"f:tty": {}}),
    "a field of what we apply empty": {"f:spec": {"f:scratch": {"f:emptyDir": {"f:medium": {}}}}},
    "another top-level part": {"f:binaryData": {"f:x": {}}},
}


@pytest.mark.parametrize("fields", FOREIGN.values(), ids=FOREIGN)
def test_what_others_add_inside_our_parts_is_foreign(fields: Json) -> None:
    assert foreign_fields(live(owner(), entry(fields))) == fields


def test_a_part_that_somebody_took_over_is_foreign() -> None:
    ours = owner()
    del ours["fieldsV1"]["f:spec"]["f:selector"]
    taken: Json = {"f:spec": {"f:selector": {}}}
    assert foreign_fields(live(ours, entry(taken))) == taken


NOT_FOREIGN = {
    "nothing": {},
    "what is ours too": OWN,
    "labels and annotations": {"f:metadata": {"f:annotations": {".": {}, "f:x": {}}}},
    "the restart of kubectl": {
        "f:spec": {"f:template": {"f:metadata": {"f:annotations": {".": {}, "f:restartedAt": {}}}}}
    },
    "allotted addresses": {"f:spec": {"f:clusterIP": {}, "f:clusterIPs": {}}},
    "status": {"f:status": {"f:loadBalancer": {}}},
    "that a list is there": {"f:spec": {"f:ports": {".": {}}}},
}


@pytest.mark.parametrize("fields", NOT_FOREIGN.values(), ids=NOT_FOREIGN)
def test_what_is_left_to_others_is_not_foreign(fields: Json) -> None:
    assert foreign_fields(live(owner(), entry(fields))) == {}


def test_neither_status_writers_nor_our_own_other_writes_are_foreign() -> None:
    fields: Json = {"f:spec": {"f:x": {}}}
    controller = entry(fields, "kube-controller-manager", subresource="status")
    webhook = entry(fields, "plimsoll-operator")
    assert foreign_fields(live(owner(), controller, webhook)) == {}


def test_a_scale_by_others_is_foreign_where_we_set_it() -> None:
    fields: Json = {"f:spec": {"f:replicas": {}}}
    assert foreign_fields(live(owner(), entry(fields, "kubectl", subresource="scale"))) == fields


def test_who_was_never_written_by_us_is_not_owned() -> None:
    assert is_owned(live(owner()))
    assert not is_owned(live(entry(OWN)))
    assert not is_owned(live())


@pytest.mark.parametrize("fields", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("kept", [{}, {"f:metadata": {"f:annotations": {"f:x": {}}}}])
def test_after_the_seizure_everything_foreign_is_ours_and_the_rest_stays(
    fields: Json, kept: Json
) -> None:
    others = entry({**fields, **kept}), entry(fields, "editor")
    before = live(owner(), *others)
    untouched = copy.deepcopy(before)
    patch = seized(before)["metadata"]
    assert before == untouched
    assert (patch["uid"], patch["resourceVersion"]) == ("uid-1", "7")
    assert patch["annotations"] == {"plimsoll.dev/applied-hash": None}

    after = live(*patch["managedFields"])
    assert foreign_fields(after) == {}
    left = {each["manager"]: each["fieldsV1"] for each in patch["managedFields"]}
    assert left.get("kubectl-patch", {}) == kept
    assert "editor" not in left
    theirs_alone = entry(left["plimsoll-operator"])
    assert foreign_fields(live(owner(), theirs_alone)) == fields


def test_a_manager_with_a_part_of_an_entry_keeps_only_what_is_not_foreign() -> None:
    both: Json = {"f:env": {'k:{"name":"A"}': {".": {}, "f:name": {}, "f:valueFrom": {}}}}
    patch = seized(live(owner(), entry(in_container(both))))["metadata"]
    _, other = patch["managedFields"]
    assert other["fieldsV1"] == in_container({"f:env": {'k:{"name":"A"}': {".": {}, "f:name": {}}}})


def test_the_seizure_of_an_object_without_our_entry_makes_one() -> None:
    fields: Json = {"f:spec": {"f:x": {}}}
    patch = seized(live(entry(fields)))["metadata"]
    assert [(e["manager"], e["operation"]) for e in patch["managedFields"]] == [
        ("plimsoll-operator", "Apply")
    ]
