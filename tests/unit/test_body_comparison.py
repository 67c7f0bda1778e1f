"""The comparison of bodies in the fidelity test."""

from tests.ray.fidelity.compare import differences


def test_only_ids_and_times_may_differ() -> None:
    one = {"id": "a", "created": 1, "choices": [{"text": "x", "index": 0}]}
    other = {"id": "b", "created": 2, "choices": [{"text": "y", "index": 0}]}
    assert list(differences(one, other)) == ["$.choices[0].text: expected 'x', got 'y'"]


def test_missing_or_new_field_is_reported_by_its_path() -> None:
    assert list(differences({"a": {"b": None}}, {"a": {"c": 1}})) == [
        "$.a.b: missing, expected None",
        "$.a.c: not expected, got 1",
    ]


def test_id_of_another_type_differs() -> None:
    assert list(differences({"id": "x"}, {"id": None})) == ["$.id: expected a str, got a NoneType"]


def test_number_types_and_list_lengths_differ() -> None:
    assert list(differences([1, 2], [1.0])) == ["$: expected 2 items, got 1", "$[0]: expected 1, got 1.0"]
