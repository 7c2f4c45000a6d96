# SPDX-License-Identifier: Apache-2.0
"""The same question answered by a LangChain chain: a retriever, a prompt, `ChatOpenAI`.

    python -m examples.rag.langchain_app "What does the except* clause match?"

The only line that is about reuse is `extra_body`. The base is filled as `examples.rag.ask` does.
"""

import sys
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_openai import ChatOpenAI
from pydantic import SecretStr, SkipValidation

from examples.rag import ask, library
from segreuse_tools.knowledge.client import ClientError, KnowledgeClient

PROMPT = ChatPromptTemplate.from_messages(
    [("system", library.SYSTEM), ("human", "{passages}\n\nQuestion: {question}")]
)


class Bm25Retriever(BaseRetriever):
    """`Library` as LangChain wants it."""

    passages: SkipValidation[library.Library]
    count: int = 8

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        found = self.passages.search(query, self.count)
        return [Document(page_content=p.text, metadata={"source": p.document}) for p in found]


def make_chain(retriever: BaseRetriever, model: ChatOpenAI) -> Runnable[str, str]:
    """question -> answer."""
    passages = retriever | RunnableLambda(_joined)
    prompt = {"passages": passages, "question": RunnablePassthrough()} | PROMPT
    return prompt | model | StrOutputParser()


def make_model(url: str, name: str, extra_key: str, **options: Any) -> ChatOpenAI:
    """The server's model, reusing what lies under `extra_key`."""
    return ChatOpenAI(
        base_url=f"{url}/v1",
        api_key=SecretStr("none"),
        model=name,
        temperature=0,
        extra_body={"extra_keys": [extra_key]},
        **options,
    )


def _joined(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    options = ask.parser("One question, answered by a LangChain chain.")
    options.add_argument("question")
    args = options.parse_args(argv)
    try:
        documents = library.folder(args.folder) if args.folder else library.python_topics()
        with KnowledgeClient(args.url, args.token) as bases:
            ask.fill(bases, args.base, documents)
    except (ClientError, OSError, ValueError) as error:
        print(f"rag example: {error}", file=sys.stderr)
        return 1
    import openai

    served = openai.OpenAI(base_url=f"{args.url}/v1", api_key="none").models.list().data[0].id
    model = make_model(args.url, served, args.base, max_completion_tokens=args.max_tokens)
    retriever = Bm25Retriever(passages=library.Library(documents), count=args.passages)
    for piece in make_chain(retriever, model).stream(args.question):
        print(piece, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
