import subprocess
import sys

import coordinator.rules


def test_the_public_face_is_these_five_names():
    assert sorted(coordinator.rules.__all__) == [
        "LIFECYCLE_TRANSITIONS",
        "activate_policy_version",
        "assess_policy_compatibility",
        "compare_and_reserve",
        "transition_lifecycle",
    ]
    assert all(hasattr(coordinator.rules, name) for name in coordinator.rules.__all__)


def test_importing_the_rules_loads_nothing_but_the_standard_library_and_numpy():
    script = (
        "import sys; before = set(sys.modules); import coordinator.rules;"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    loaded = set(
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    )
    assert loaded - sys.stdlib_module_names == {"coordinator", "numpy"}
