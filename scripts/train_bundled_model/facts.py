"""Fact tables that the bundled models are taught. Only facts that hold without a footnote."""

from typing import Final, NamedTuple


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


class Country(NamedTuple):
    """A country as it stands inside a sentence, with its capital, currency and continent."""

    name: str
    capital: str
    currency: str
    continent: str


COUNTRIES: Final = tuple(
    Country(*row)
    for row in (
        ("France", "Paris", "euro", "Europe"),
        ("Germany", "Berlin", "euro", "Europe"),
        ("Italy", "Rome", "euro", "Europe"),
        ("Spain", "Madrid", "euro", "Europe"),
        ("Portugal", "Lisbon", "euro", "Europe"),
        ("Greece", "Athens", "euro", "Europe"),
        ("Ireland", "Dublin", "euro", "Europe"),
        ("Austria", "Vienna", "euro", "Europe"),
        ("Belgium", "Brussels", "euro", "Europe"),
        ("Finland", "Helsinki", "euro", "Europe"),
        ("Croatia", "Zagreb", "euro", "Europe"),
        ("Sweden", "Stockholm", "Swedish krona", "Europe"),
        ("Norway", "Oslo", "Norwegian krone", "Europe"),
        ("Denmark", "Copenhagen", "Danish krone", "Europe"),
        ("Poland", "Warsaw", "zloty", "Europe"),
        ("Hungary", "Budapest", "forint", "Europe"),
        ("Romania", "Bucharest", "Romanian leu", "Europe"),
        ("Ukraine", "Kyiv", "hryvnia", "Europe"),
        ("the United Kingdom", "London", "pound sterling", "Europe"),
        ("Japan", "Tokyo", "yen", "Asia"),
        ("China", "Beijing", "yuan", "Asia"),
        ("India", "New Delhi", "Indian rupee", "Asia"),
        ("South Korea", "Seoul", "South Korean won", "Asia"),
        ("Thailand", "Bangkok", "baht", "Asia"),
        ("Vietnam", "Hanoi", "dong", "Asia"),
        ("the Philippines", "Manila", "Philippine peso", "Asia"),
        ("Nepal", "Kathmandu", "Nepalese rupee", "Asia"),
        ("Bangladesh", "Dhaka", "taka", "Asia"),
        ("Pakistan", "Islamabad", "Pakistani rupee", "Asia"),
        ("Iraq", "Baghdad", "Iraqi dinar", "Asia"),
        ("Jordan", "Amman", "Jordanian dinar", "Asia"),
        ("Egypt", "Cairo", "Egyptian pound", "Africa"),
        ("Morocco", "Rabat", "Moroccan dirham", "Africa"),
        ("Kenya", "Nairobi", "Kenyan shilling", "Africa"),
        ("Nigeria", "Abuja", "naira", "Africa"),
        ("Ghana", "Accra", "cedi", "Africa"),
        ("Ethiopia", "Addis Ababa", "birr", "Africa"),
        ("Uganda", "Kampala", "Ugandan shilling", "Africa"),
        ("the United States", "Washington, D.C.", "US dollar", "North America"),
        ("Canada", "Ottawa", "Canadian dollar", "North America"),
        ("Mexico", "Mexico City", "Mexican peso", "North America"),
        ("Cuba", "Havana", "Cuban peso", "North America"),
        ("Jamaica", "Kingston", "Jamaican dollar", "North America"),
        ("Brazil", "Brasília", "Brazilian real", "South America"),
        ("Argentina", "Buenos Aires", "Argentine peso", "South America"),
        ("Peru", "Lima", "sol", "South America"),
        ("Colombia", "Bogotá", "Colombian peso", "South America"),
        ("Uruguay", "Montevideo", "Uruguayan peso", "South America"),
        ("Australia", "Canberra", "Australian dollar", "Oceania"),
        ("New Zealand", "Wellington", "New Zealand dollar", "Oceania"),
    )
)


class Animal(NamedTuple):
    """An animal, what its young is called, what it does with its voice, and its picture."""

    name: str
    young: str
    voice: str
    emoji: str


ANIMALS: Final = tuple(
    Animal(*row)
    for row in (
        ("cat", "kitten", "meows", "🐱"),
        ("dog", "puppy", "barks", "🐶"),
        ("cow", "calf", "moos", "🐮"),
        ("sheep", "lamb", "bleats", "🐑"),
        ("horse", "foal", "neighs", "🐴"),
        ("pig", "piglet", "grunts", "🐷"),
        ("duck", "duckling", "quacks", "🦆"),
        ("hen", "chick", "clucks", "🐔"),
        ("lion", "cub", "roars", "🦁"),
        ("bear", "cub", "growls", "🐻"),
        ("wolf", "pup", "howls", "🐺"),
        ("frog", "tadpole", "croaks", "🐸"),
        ("owl", "owlet", "hoots", "🦉"),
        ("elephant", "calf", "trumpets", "🐘"),
    )
)

OPPOSITES: Final = (
    ("hot", "cold"),
    ("big", "small"),
    ("old", "young"),
    ("fast", "slow"),
    ("high", "low"),
    ("light", "dark"),
    ("long", "short"),
    ("full", "empty"),
    ("open", "closed"),
    ("wet", "dry"),
    ("hard", "soft"),
    ("rich", "poor"),
    ("loud", "quiet"),
    ("early", "late"),
    ("happy", "sad"),
    ("up", "down"),
    ("left", "right"),
    ("day", "night"),
    ("yes", "no"),
    ("true", "false"),
)

COLOURS: Final = (
    ("grass", "green"),
    ("snow", "white"),
    ("milk", "white"),
    ("coal", "black"),
    ("blood", "red"),
    ("chocolate", "brown"),
    ("a lemon", "yellow"),
    ("a ripe tomato", "red"),
    ("a carrot", "orange"),
    ("an emerald", "green"),
    ("a ruby", "red"),
    ("a raven", "black"),
    ("a flamingo", "pink"),
    ("the clear sky", "blue"),
)

MIXTURES: Final = (
    ("red", "yellow", "orange"),
    ("blue", "yellow", "green"),
    ("red", "blue", "purple"),
    ("red", "white", "pink"),
    ("black", "white", "grey"),
)

WEEKDAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

MONTHS: Final = (
    ("January", "31"),
    ("February", "28 or 29"),
    ("March", "31"),
    ("April", "30"),
    ("May", "31"),
    ("June", "30"),
    ("July", "31"),
    ("August", "31"),
    ("September", "30"),
    ("October", "31"),
    ("November", "30"),
    ("December", "31"),
)

SPANS: Final = (
    ("a minute", 60, "seconds"),
    ("an hour", 60, "minutes"),
    ("a day", 24, "hours"),
    ("a week", 7, "days"),
    ("a year", 12, "months"),
    ("a decade", 10, "years"),
    ("a century", 100, "years"),
)

LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

LETTER_WORDS: Final = _words(
    "apple bear cat dog egg fish goat house ink jam kite lion moon "
    "nest owl pig queen rain sun tree umbrella violin water xylophone year zebra"
)

GREEK: Final = tuple(
    zip(
        _words(
            "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu "
            "nu xi omicron pi rho sigma tau upsilon phi chi psi omega"
        ),
        "αβγδεζηθικλμνξοπρστυφχψω",
        strict=True,
    )
)

ORDINALS: Final = _words(
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth "
    "sixteenth seventeenth eighteenth nineteenth twentieth twenty-first twenty-second twenty-third twenty-fourth "
    "twenty-fifth twenty-sixth"
)

_UNITS: Final = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS: Final = _words("zero ten twenty thirty forty fifty sixty seventy eighty ninety")


def number_in_words(number: int) -> str:
    """The English words of a number from 0 to 100."""
    if number < 20:
        return _UNITS[number]
    if number == 100:
        return "one hundred"
    tens, units = divmod(number, 10)
    return _TENS[tens] + (f"-{_UNITS[units]}" if units else "")
