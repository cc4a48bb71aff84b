"""The texts of an SVG that matplotlib wrote."""

from xml.etree import ElementTree


def tree_of(svg):
    """The SVG with its comments: matplotlib writes a formula into a comment before its characters."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    parser.feed(svg)
    return parser.close()


def texts_of(element):
    """The texts and formulas in an element, in the order in which they are drawn."""
    texts = []
    for node in element.iter():
        is_formula = node.tag is ElementTree.Comment
        # The characters of a formula are children of its text.
        is_text = str(node.tag).endswith("}text") and len(node) == 0
        if is_formula or is_text:
            texts.append((node.text or "").strip())
    return texts
