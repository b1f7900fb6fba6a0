"""Text from the templates of the `templates/` folder."""

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from stage.catalog import content

__all__ = ["render"]


def render(template: str, **values: object) -> str:
    """Return the text of a template; a value that it uses and is not given is an error of ours."""
    environment = Environment(
        loader=FileSystemLoader(content("templates")),
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701 - simulator files and shell scripts are no HTML
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)
