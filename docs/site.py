"""What the site adds to the pages of this folder. mkdocs calls the functions named `on_…`.

- The README is its home, and the studies' READMEs are pages.
- Links in pages are those of the repository, so that they work where the repository is read; here they become
  the site's. A file outside this folder that a page links to is published with it.
- The API reference has a page for every room with public names; one without a docstring fails the build.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

import mergekit_lab

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\(|src=\"|href=\")([^)#\s\"]+)")
log = logging.getLogger("mkdocs.hooks.site")


def on_config(config: MkDocsConfig) -> None:
    """Add the API reference to the navigation."""
    config.nav.append({"API reference": [f"api/{name}.md" for name in reference()]})
    for name in undocumented():
        log.warning("%s is public and has no docstring", name)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add what does not stand in this folder: the home, studies, the API reference, and what pages link to."""
    for path in [ROOT / "README.md", *sorted(ROOT.glob("experiments/*/README.md"))]:
        publish(path.relative_to(ROOT).as_posix(), files, config)
    pages = [file for file in files if file.src_uri.endswith(".md")]
    for page in pages:  # grows, as linked pages have links too
        for _, link in LINK.findall(page.content_string):
            target = resolve(page.src_uri, link)
            if "://" not in link and (ROOT / target).exists():
                pages += publish(target, files, config)
    for name, content in reference().items():
        files.append(File.generated(config, f"api/{name}.md", content=content))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the repository's links into the site's."""
    here = page.file.src_uri

    def turn(link: re.Match[str]) -> str:
        target = in_site(resolve(here, link[2]))
        return (
            link[0] if "://" in link[2] else link[1] + posixpath.relpath(target, posixpath.dirname(here) or ".")
        )

    return LINK.sub(turn, markdown)


def resolve(uri: str, link: str) -> str:
    """What a link on a page leads to, in the repository."""
    page = "README.md" if uri == "index.md" else uri if is_outside(uri) else f"docs/{uri}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def is_outside(uri: str) -> bool:
    """Whether a page of the site stands outside this folder."""
    return not (ROOT / "docs" / uri).exists()


def in_site(path: str) -> str:
    """Where a file or folder of the repository is in the site."""
    if (ROOT / path).is_dir():
        return f"{path}/index.md"
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def publish(path: str, files: Files, config: MkDocsConfig) -> list[File]:
    """Have a file of the repository in the site, or a folder as a list of its files; pages that are new."""
    uri = in_site(path)
    if files.get_file_from_path(uri) is not None:
        return []
    source = ROOT / path
    if source.is_dir():
        names = sorted(file.name for file in source.iterdir() if file.is_file())
        listing = "\n".join([f"# {path}", "", *(f"- [{name}]({name})" for name in names)])
        file = File.generated(config, uri, content=listing, inclusion=InclusionLevel.NOT_IN_NAV)
    else:
        file = File.generated(config, uri, abs_src_path=str(source), inclusion=InclusionLevel.NOT_IN_NAV)
    files.append(file)
    return [file] if uri.endswith(".md") else []


def reference() -> dict[str, str]:
    """The pages of the API reference by name: the package's own names, then each room that has some."""
    top = "\n".join(f"::: {room}.{name}\n" for name, room in mergekit_lab._PUBLIC.items())
    rooms = [
        init.parent.name
        for init in sorted(ROOT.glob("mergekit_lab/*/__init__.py"))
        if "__all__" in init.read_text()
    ]
    return {"mergekit_lab": f"# mergekit_lab\n\n{top}"} | {
        name: f"# {name}\n\n::: mergekit_lab.{name}\n    options:\n      show_root_heading: false\n"
        for name in rooms
    }


def undocumented() -> Iterator[str]:
    """Public names of rooms, and public methods, without a docstring.

    A method that overrides another has that one's.
    """
    package = griffe.load("mergekit_lab", search_paths=[ROOT])
    for room in (package[name] for name in reference() if name != "mergekit_lab"):
        for name in map(str, room.exports):
            thing = room[name].final_target if room[name].is_alias else room[name]
            if not thing.has_docstring:
                yield f"{room.path}.{name}"
            if thing.is_class and not overrides_another_package(thing):
                yield from (m.path for m in thing.functions.values() if not has_docstring(m, thing))


def overrides_another_package(kind: griffe.Class) -> bool:
    """Whether a class has methods that another package calls and documents."""
    return any(len(each.bases) > len(each.resolved_bases) for each in [kind, *kind.mro()])


def has_docstring(method: griffe.Function, kind: griffe.Class) -> bool:
    """Whether a method is private or documented, where it stands or where it is declared."""
    declared = [base.members[method.name] for base in kind.mro() if method.name in base.members]
    return method.name.startswith("_") or any(each.has_docstring for each in [method, *declared])
