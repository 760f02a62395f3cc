"""Text of the books that come with Rust's documentation, to `docs.json`: a list of (name, text).

    DOC_HTML=~/.rustup/toolchains/stable-x86_64-unknown-linux-gnu/share/doc/rust/html python extract.py
"""
import html.parser
import json
import os
import pathlib
import re

BOOKS = ['book', 'reference', 'rust-by-example', 'cargo', 'rustc', 'rustdoc', 'nomicon', 'edition-guide',
         'embedded-book', 'style-guide', 'clippy', 'unstable-book']
BREAKS = ('p', 'li', 'h1', 'h2', 'h3', 'h4', 'tr', 'div', 'br', 'blockquote')


class Page(html.parser.HTMLParser):
    """What stands in `main`, a line for each block; code as it is."""

    def __init__(self):
        super().__init__()
        self.out, self.main, self.skip, self.pre = [], 0, 0, 0

    def handle_starttag(self, tag, attrs):
        self.main += tag == 'main'
        self.skip += tag in ('script', 'style', 'button')
        self.pre += tag == 'pre'
        if tag == 'pre' or tag in BREAKS:
            self.out.append('\n')

    def handle_endtag(self, tag):
        self.main -= tag == 'main'
        self.skip -= tag in ('script', 'style', 'button')
        self.pre -= tag == 'pre'
        if tag in ('pre', 'p', 'h1', 'h2', 'h3', 'h4'):
            self.out.append('\n')

    def handle_data(self, data):
        if self.main > 0 and self.skip <= 0:
            self.out.append(data if self.pre else re.sub(r'\s+', ' ', data))


root, docs = pathlib.Path(os.path.expanduser(os.environ['DOC_HTML'])), []
for book in BOOKS:
    for file in sorted((root / book).rglob('*.html')):
        if file.name in ('print.html', 'toc.html', '404.html'):
            continue
        page = Page()
        page.feed(file.read_text(errors='ignore'))
        text = re.sub(r'\n[ \t]*\n\s*\n+', '\n\n', ''.join(page.out)).strip()
        text = ''.join(c for c in text if ord(c) < 0x2600)
        if len(text) > 400:
            docs.append((f'{book}/{file.relative_to(root / book)}', text))
print(len(docs), 'documents,', sum(len(t) for _, t in docs), 'characters')
json.dump(docs, open('docs.json', 'w'))
