"""Lets a Markdown link `page.md#name` name an explicit label `(name)=`, not only a heading's own anchor.

in: MyST references to a page with a target -> out: resolved links where the target is a label of that page.
What is no label is left to MyST, which looks among the headings and warns.
"""

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode


class LabelAnchors(SphinxPostTransform):
    default_priority = 8  # before MyST's own resolver, which is 9

    def run(self, **kwargs) -> None:
        labels = self.env.domaindata["std"]["anonlabels"]
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node["reftype"] != "myst" or node.get("refdomain") != "doc" or not node.get("reftargetid"):
                continue
            docname, ident = labels.get(node["reftargetid"].lower(), (None, None))
            if docname != node["reftarget"]:
                continue
            title = self.env.domaindata["std"]["labels"].get(node["reftargetid"].lower(), ("", "", ""))[2]
            text = nodes.inline("", "", classes=["std", "std-ref"])
            children = node[0].children or [nodes.Text(title or node["reftargetid"])]
            text += children
            node.replace_self(make_refnode(self.app.builder, node["refdoc"], docname, ident, text))


def setup(app):
    app.add_post_transform(LabelAnchors)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
