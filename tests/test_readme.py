import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_environment_in_the_readme_works():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (code,) = [block for block in blocks if "class ReverseEnv" in block]
    assert len(code.splitlines()) < 30
    scope: dict = {"__name__": "readme"}
    exec(code, scope)  # its last line runs the self-check
    env = scope["ReverseEnv"](words=["abc"])
    env.reset(options={"prompt_id": "abc"})
    assert env.step("cba")[1] == 1.0


def test_images_and_documents_that_the_readme_shows_exist():
    targets = re.findall(r"\]\((?!https?:)([^)]+)\)", README)
    assert targets
    for target in targets:
        assert (Path(__file__).parents[1] / target).exists(), target
