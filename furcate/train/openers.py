"""How users' turns may begin when the target writes both sides: generic words of our own.

Left to itself a small model asks short questions of few kinds. A turn that begins with one of
these makes it write the long and varied prompts that users send: passages to work on, exercises,
lists, code. None of it is taken from a set of evaluation prompts, which a test checks.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FOLLOW_UPS", "OPENERS", "SYSTEMS", "Opener"]


@dataclass(frozen=True, slots=True)
class Opener:
    """The first words of a user's turn, which the target completes; `passage`: at length."""

    text: str
    passage: bool = False


# the usual system message of the template is kept for most conversations; "" leaves it empty
SYSTEMS = (
    "",
    "You are a helpful assistant.",
    "You are a careful expert. Answer briefly and to the point.",
    "You are a patient teacher who explains every step.",
    "You are a professional writer and editor.",
    "You are an experienced programmer. Answer with working code.",
    "Answer only from the text that the user gives you.",
    "You are a translator. Give the translation alone, without remarks.",
)

_PASSAGES = (
    "Summarize the following article:\n\n",
    "Summarize this text in a few sentences.\n\n",
    "Give me the main points of the article below as a list.\n\nArticle:",
    "What is this news report about? Keep it short.\n\n",
    "Write a headline and a one-paragraph summary for this report.\n\nReport:",
    "Shorten this letter without losing anything important:\n\n",
    "Proofread the text below and correct its mistakes:\n\n",
    "Rewrite this paragraph in plain language:\n\n",
    "Rewrite the following message so that it sounds more polite:\n\n",
    "Turn these notes into a well-written paragraph:\n\n-",
    "Translate this paragraph into French:\n\n",
    "Translate the following German text into English.\n\nText: Der",
    "Translate from French to English: Les",
    "Please put this Spanish text into English: El",
    "Extract all names, places and dates from this text:\n\n",
    "Make a table of the products and prices that this text mentions:\n\n",
    "List the people in the story below and say what each of them wants.\n\n",
    "Classify each of these customer reviews as positive or negative:\n\n1.",
    "Find the bug in this code and fix it:\n\n```python\n",
    "Explain step by step what this function does:\n\n```python\ndef",
    "Add comments to this program:\n\n```\n",
    "Continue this story:\n\n",
    "Answer the question using the passage.\n\nPassage:",
    "Read the text and then answer the question below it.\n\nText:",
    "Context:",
    "Here is an article from an encyclopedia. Who is it about, and what did they do?\n\n",
    "Use only this passage to say when it happened and why:\n\n",
    "Below are three search results. Answer my question from them.\n\n[1]",
)

_SHORT = (
    "Explain",
    "Explain in simple words how",
    "Tell me the difference between",
    "Why do",
    "How does",
    "How can I",
    "Who was",
    "Who wrote",
    "Who played",
    "When did",
    "When was",
    "Where is",
    "What year",
    "What is the name of",
    "How many",
    "Write a short story about",
    "Write a poem about",
    "Write an email to",
    "Write a blog post about",
    "Write a dialogue between",
    "Write an essay on",
    "Write a product description for",
    "Write a Python function that",
    "Write a program in C that",
    "Write an SQL query that",
    "Write a JavaScript function which",
    "Implement",
    "List five",
    "Give me ten ideas for",
    "Give three examples of",
    "Make a plan for",
    "Compare",
    "Describe",
    "Discuss the causes of",
    "What are the advantages and disadvantages of",
    "Imagine you are",
    "Pretend to be",
    "Act as",
    "You are a tour guide.",
    "Let's play a game. You are",
    "Solve this problem step by step:",
    "Solve the equation",
    "Compute",
    "A farmer has",
    "A train leaves",
    "Anna buys",
    "Tom and his sister have",
    "In a class of",
    "A shop sells",
    "If a worker earns",
    "Each box holds",
    "Three friends",
    "Suppose that",
    "Prove that",
    "Is it true that",
    "Recommend",
    "Give me a recipe for",
    "Convert",
    "Complete the sentence:",
    "What would happen if",
)

OPENERS = (
    *(Opener(text, passage=True) for text in _PASSAGES),
    *(Opener(text) for text in _SHORT),
)

FOLLOW_UPS = (
    "Now",
    "Can you",
    "Please make it shorter",
    "Rewrite your answer",
    "Translate your answer into",
    "Explain the second point",
    "Give me another example",
    "Why",
    "What if",
    "And how",
    "Are you sure",
    "Summarize what you said",
    "Put that in a table",
    "Add",
    "Change",
    "Thanks! Next question:",
)
