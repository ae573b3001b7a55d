"""Manifests: what is not changed stays as it was written, what is changed is exactly what was wanted."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache_cli.manifests import change, parse_manifest, plain
from pykvcache_cli.pod_templates import pod_templates
from pykvcache_contract.errors import ConfigurationError

FLUSH = """\
# head
a: 1  # one
list:
- name: x   # the first
  value: "quoted"
# between
- name: y
flow: {k: [1, 2]}
text: |
  several
  lines
---
b: 'single'
"""
INDENTED = """\
spec:
  containers:
    - name: vllm
      args:
        - --model
        - m # which
  empty: []
"""
names = st.sampled_from("abcd")
trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(names, inner, max_size=4)
        | st.lists(st.fixed_dictionaries({"name": names}, optional={"value": inner}), max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("text", [FLUSH, INDENTED, "---\na: 1\n---\nb: 2\n", '{\n  "a": [1, "ü"]\n}\n'])
def test_a_manifest_that_nobody_changes_is_written_as_it_was(text):
    assert parse_manifest(text, source="x").render() == text


@given(before=st.dictionaries(names, trees, max_size=4), after=st.dictionaries(names, trees, max_size=4))
def test_a_changed_document_is_exactly_the_wanted_one(before, after):
    wanted = copy.deepcopy(after)
    change(before, after)
    assert plain(before) == wanted == after


def test_comments_stay_with_what_they_are_about_when_entries_come_before_and_behind():
    manifest = parse_manifest(FLUSH, source="x")
    document = manifest.documents[0]
    wanted = plain(document)
    wanted["list"] = [{"name": "new"}, {"name": "x", "value": "changed"}, {"name": "y"}, {"name": "last"}]
    change(document, wanted)
    lines = manifest.render().splitlines()
    assert lines.index("# between") == lines.index("- name: y") - 1
    assert "- name: x   # the first" in lines
    assert "flow: {k: [1, 2]}" in lines


def test_added_entries_are_indented_as_the_others():
    manifest = parse_manifest(INDENTED, source="x")
    wanted = plain(manifest.documents[0])
    wanted["spec"]["containers"][0]["args"].append("--more")
    change(manifest.documents[0], wanted)
    assert manifest.render() == INDENTED.replace("- m # which\n", "- m # which\n        - --more\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: [1", "line 2"),
        ("a: {{ .Values.x }}\n", "helm template"),
        ("a: 1\na: 2\n", "found duplicate key"),
        ("a: !!python/object:os.system 1\n- b", "line 2"),
    ],
)
def test_what_is_no_manifest_is_refused_with_its_place(text, said):
    with pytest.raises(ConfigurationError, match=r"x\.yaml") as caught:
        parse_manifest(text, source="x.yaml")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("document", "paths"),
    [
        ({"kind": "Pod", "spec": {"containers": []}}, [""]),
        ({"kind": "Pod"}, []),
        ({"kind": "Deployment", "spec": {"template": {"spec": {"containers": []}}}}, ["spec.template"]),
        (
            {"kind": "CronJob", "spec": {"jobTemplate": {"spec": {"template": {"spec": {"containers": []}}}}}},
            ["spec.jobTemplate.spec.template"],
        ),
        (
            {
                "kind": "LeaderWorkerSet",
                "spec": {
                    "leaderWorkerTemplate": {
                        "leaderTemplate": {"spec": {"containers": []}},
                        "workerTemplate": {"spec": {"containers": []}},
                    }
                },
            },
            ["spec.leaderWorkerTemplate.leaderTemplate", "spec.leaderWorkerTemplate.workerTemplate"],
        ),
        (
            {"kind": "RayCluster", "spec": {"workerGroupSpecs": [{"template": {"spec": {"containers": []}}}]}},
            ["spec.workerGroupSpecs[0].template"],
        ),
        ({"kind": "ConfigMap", "data": {"spec": "containers"}}, []),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_pod_templates_are_found_wherever_they_are(document, paths):
    assert [template.path for template in pod_templates(document)] == paths
