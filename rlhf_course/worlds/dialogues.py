"""Invented preference dialogues with an exactly known utility, for working without a network.

`make_pairs` draws everyday questions in the format of hh-rlhf, two answers to each, and a noisy verdict on which
is better. `gold_utility` scores any answer by what its words show, and the verdict follows the model of Bradley
and Terry ("Rank analysis of incomplete block designs", Biometrika 39, 1952): a beats b with probability
sigmoid(u_a - u_b). So the best accuracy that any reward model can expect is known too (`ceiling`).
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

# Gold weights in nats; what earns those of the second line never occurs in the pairs, but an audit may try it.
POINTS = {"word": 0.15, "no_word": -0.6, "courtesy": 0.9, "reason": 0.9, "evasion": -1.2, "rudeness": -2.0}
POINTS |= {"repeat": -0.5, "empty": -3.0, "copy": -1.0, "breaks_off": -0.5}
MAX_WORDS = 4  # topic words beyond the fourth earn nothing
MARKERS = {
    "courtesy": "happy to help|glad you asked|thank you for|good luck|hope this helps|feel free",
    "reason": "because|so that|otherwise",
    "evasion": "hard to say|it depends|not sure|no idea|look it up",
    "rudeness": "stupid|lazy|foolish|obvious to anyone|waste my time",
}
# How often each trait is drawn. "no_tip" holds among evasive and rude answers. Leads and asides add length and
# no utility, so that the longer answer is the better one only a little more often than not.
SHARE = {"courtesy": 0.45, "reason": 0.5, "evasion": 0.2, "rudeness": 0.15, "no_tip": 0.3, "lead": 0.35}
SHARE |= {"aside": 0.55, "preface": 0.75, "follow_up": 0.2}
TIP_COUNTS = [1, 1, 1, 2, 2, 2, 3]  # drawn from: how many tips an answer gives
LENGTHS = range(8, 61)  # in words, of answers

# "slot: option|option", where one of (a/b/c) is drawn. The slot of a topic is the words that name it in a question;
# then come its questions and its tips: an imperative, ">" and a reason that may be left out. "*" marks words that
# earn points. Tips stand in the order in which one follows them, and each must suit every question of its topic.
TABLES = """
preface: (Hello/Hi there/Good morning/Good evening)!|(Hello/Hi)! I am (new to this/a bit stuck).|I am (new to this/a bit
    stuck/asking for a friend).|My (sister/brother/son/boss) could not tell me.|Sorry to bother you.
thanks: Thanks!|Thank you.|I see, thanks.|That makes sense.|Okay, I will (try/do) that.|Good to know.
one: {}.|{}.|{}.|I would {}.|It helps to {}.|It is best to {}.|Try to {}.|Remember to {}.|Most of all, {}.
two: {}, and {}.|First {}, then {}.|I would {}, and {}.|It helps to {} and to {}.|Two things help: {}, and {}.
courtesy_open: I am happy to help.|Happy to help with this!|I am glad you asked.|Glad you asked!|Thank you for asking!
courtesy_end: Good luck!|Good luck with it!|I hope this helps.|I hope this helps a little.|Feel free to ask again.
evasion_open: It is hard to say.|That is hard to say from here.|It depends.|It depends on so many things.|I am not
    sure.|I am not sure what to tell you.|I have no idea, really.
evasion_end: Just look it up.|You could look it up somewhere.|Better look it up yourself.|In the end, it depends.
rudeness_open: What a stupid thing to ask.|This is obvious to anyone.|Only a lazy person asks that.|That is a foolish
    thing to ask.|Please do not waste my time.|Did you really have to waste my time with this?
rudeness_end: Do not be so lazy.|Any foolish person could do that.|Do not waste my time.|It is obvious to anyone.
lead: Here is what usually works.|This comes up quite often.|This comes up again and again, in one form or another.|
    Plenty of people (wonder about/struggle with) this at some point.|Let me share what tends to help.
aside: Opinions differ on the details.|It may take a few attempts.|Most people find their own way in time.|There are
    several ways to go about it.|Some people do it quite differently and are just as happy.|Over the years you will find
    habits of your own, and they may suit you better.|The next person may tell you something else, and that is normal.
bread loaf: How do I bake a (better/good/proper) (sourdough/white/rye) loaf at home?|Why is my (home-made/white/rye)
    bread so (flat/dense/heavy)?|How can I improve my (weekend/daily/sourdough) bread?|I want to bake bread (this
    winter/for my family); what now?|weigh the *flour and the *salt on a *scale>, because cups are never exact|use a
    lively *starter or fresh *yeast>; otherwise nothing will rise|fold the *dough several times> so that it grows
    strong|rest the dough in the *fridge>, because slow rising adds flavour|heat the *oven for a full hour>, because a
    hot *stone makes the loaf rise|put a *tray of hot water in the oven> so that *steam keeps the crust thin|wait until
    the *crust is dark brown>; otherwise the inside stays damp|cool it on a *rack> so that the *crumb can set
bicycle bike: How do I keep my (old/new/city) (bicycle/bike) in (good/decent/safe) shape?|What should I check on a
    (used/borrowed/rusty) bike before a (long ride/tour)?|My bike (rattles/feels slow/makes odd noises); what can I do?|
    How can I look after a (road/folding/mountain) bike?|fill both *tyres with a *pump once a week>, because soft ones
    wear out early|clean the *chain with an old *rag> so that grit does not eat the metal|put a drop of *oil on the
    chain>; otherwise it will rust|look at each *brake *pad once a month>, because thin ones stop badly|tighten any
    slack *cable> so that each *lever works at once|tighten every *bolt>; otherwise it may fall off|check each *wheel
    for a loose *spoke>, because a bent one only gets worse|set the *saddle high>, because a low one hurts the knees
houseplant fern ivy palm: How do I keep my (fern/ivy/palm) alive (in winter/in a small flat)?|Why does my
    (fern/ivy/palm) look so (sad/pale/limp)?|How can I look after a (houseplant/fern/palm) (well/with little effort)?|My
    houseplant is (dying/losing its leaves/turning yellow); what can I do?|Can you help me save a (fern/palm) that looks
    half dead?|move it closer to a bright *window>, because most rooms lack *light|keep it away from the *radiator>,
    because hot air dries it out|water it only when the *soil feels dry>; otherwise the *roots will rot|use a *pot with
    *holes in the bottom> so that spare *water can run out|wipe the *dust off the *leaves> so that they can breathe|give
    it some *fertiliser in summer>, because the soil runs out of food|look for *insects every week>; otherwise they will
    spread|cut off dead *stems with clean *scissors> so that new ones have room
interview: How (should/can) I prepare for (a job/an important/a second) interview?|I have an interview (at a bank/at a
    school/on Monday/tomorrow); what should I do?|What makes a (good/strong/lasting) impression at an interview?|How do
    I stay calm in (a long/an online/a job) interview?|Can you give me advice for my (first/next) interview?|read about
    the *company in advance>, because it shows real *interest|rehearse with a *friend> so that your *voice sounds
    natural|prepare two *examples from your past work>, because people remember *stories|find out what *salary is usual>
    so that you can discuss it|print *copies of your *papers>; otherwise a lost file will cause stress|plan the *route
    and lay out your *clothes> so that the morning is calm|greet everyone with a *smile>, because first impressions
    last|admit one *weakness>; otherwise nobody will believe your *strengths
sleep asleep wake: How can I sleep better (at night/during the week/in summer)?|Why do I wake up so
    (tired/often/early)?|What helps against (restless/light/bad) sleep?|I cannot fall asleep (before midnight/these
    days); what should I change?|How (do/can) I get (more/deeper/enough) sleep?|get *daylight every morning>, because it
    sets the inner *clock|keep any *nap short>; otherwise you will lie awake later|avoid *caffeine after *lunch>,
    because it works for hours|keep the same *bedtime every day>, because the body likes a *rhythm|leave your *phone in
    another room>, because its *screen wakes you|write your *worries on a *list> so that they leave you alone|hang dark
    *curtains in the *bedroom>; otherwise the sun will wake you|read a quiet *book> so that your *mind slows down
guitar: How (do/can) I learn the guitar (at my age/without a teacher/from scratch)?|What should I practise on (my new/an
    old/an acoustic) guitar?|Why does my guitar playing sound so (clumsy/uneven/rough)?|How can I get better at the
    guitar (this year/on my own)?|I have just bought a (second-hand/cheap/nice) guitar; what now?|check the *strings
    with a *tuner>, because they soon go flat|learn three easy *chords>, because many songs need no more|hold the *thumb
    behind the *neck> so that your hand can move freely|press close to the *fret>; otherwise the *notes will buzz|play
    with a *metronome> so that the *rhythm stays even|use a soft *pick>, because it forgives small *mistakes|play slow
    *scales every day> so that your *fingers grow strong|choose *songs you love>; otherwise you will soon give up
saving money: How can I save (some/more/a little) money (every month/on a low income/as a student)?|What is a simple way
    to build up savings (before a move/for a holiday)?|I earn (little/enough/a fair amount) but save no money; what can
    I change?|Why is my money gone (so soon/before the weekend)?|How do I start (saving/putting money aside)?|keep your
    *receipts for a month> so that you see where it goes|write a simple *budget>, because you cannot cut what you do not
    see|pay off any *debt early>, because the *interest keeps growing|fill a second *account on *payday>; otherwise
    nothing is left at the end|cancel any *subscription you rarely use>, because small *fees add up|compare *insurance
    *prices once a year>, because loyal customers often pay more|take your own *lunch to work> so that you buy no
    *snacks|write a *list before you shop>; otherwise the *supermarket decides for you
puppy: How do I train a (new/young/lively) puppy (in a flat/at home/on my own)?|How can I get our puppy to
    (behave/listen/settle in)?|What should I know before (my/our/a friend's) puppy comes home?|Our puppy (chews
    everything/barks all night/jumps at people); what can we do?|book a visit to the *vet> so that the *vaccines come in
    time|put its *basket in a *corner>, because it needs much sleep|take it to the *garden after each *meal> so that it
    learns where to go|praise it with a small *treat>, because *rewards teach faster than anger|offer it a *toy>;
    otherwise it will choose your *shoes|use one word for each *command>; otherwise it has to guess|practise with a
    *leash indoors>, because the *street is full of distractions|let it meet *visitors>; otherwise *strangers scare it
coffee: How do I make (good/better/stronger) coffee (at home/at the office/for guests)?|Why does my coffee taste so
    (bitter/sour/weak)?|How can I improve my (morning/breakfast) coffee (on a budget/this week)?|What makes a
    (smooth/rich/really good) cup of coffee?|buy fresh *beans in small bags>, because the *aroma fades in weeks|store
    the beans in a closed *tin>, because *air makes them stale|use a good *grinder>; otherwise even the best beans taste
    dull|put the beans on a *scale> so that every cup tastes the same|rinse the *filter with hot water>; otherwise you
    will taste the *paper|warm the *mug>, because a cold one spoils the taste|let the *kettle stand for a minute>,
    because boiling *water is too hot|wet the *grounds and wait a little> so that *gas can escape
star sky astronomy stargazing: How do I start looking at the stars (from a city/with children/this winter)?|How (do/can)
    I learn to read the night sky (on my own/at my age)?|What does a beginner in (astronomy/stargazing) need?|How can I
    enjoy the night sky (on holiday/from a village/with friends)?|get away from street *lamps>, because a dark place
    matters most|choose a night without a *moon>; otherwise the sky is too bright|bring a *blanket>, because you will
    sit still for a long time|use a red *torch>; otherwise your *eyes must adapt to the dark again|find the *Plough>,
    because it shows the way *north|take a *map> so that you can learn one *constellation at a time|look for *planets
    after *sunset>, because they are very bright|use *binoculars>, because they show *craters on the moon
soup: How do I make a (good/hearty/simple) (vegetable/lentil/winter) soup?|Why does my (lentil/vegetable/potato) soup
    taste so (thin/bland/dull)?|How can I make a (tasty/filling/rich) soup without meat?|What should I change about my
    (lentil/vegetable/potato) soup?|cook the *onions slowly in *butter>, because they turn sweet that way|roast the
    *carrots> so that they taste stronger|use real *stock>; otherwise it tastes of hot *water|put in some *thyme and a
    *bay leaf>, because *herbs give it depth|add *salt in small steps>, because you cannot take it out again|put half of
    it through a *blender> so that it thickens without *cream|taste a *spoon of it now and then>; otherwise you are only
    guessing|serve it with *lemon and *parsley>, because they wake up the other flavours
chess: How (do/can) I get better at chess (as an adult/in my free time/without a coach)?|Why do I keep losing at chess
    (to my brother/online/in the evening)?|What should a (beginner/child) learn first in chess?|How can I win more games
    of chess (at school/against friends/this year)?|fight for the *centre with a *pawn> so that the others have room|
    bring out *knights and *bishops>, because *pieces at home do not fight|keep the *queen at home>; otherwise she will
    be chased around|*castle early>, because the *king is in danger in the middle|see what your *opponent wants>,
    because one *blunder can lose the game|put each *rook on an open *file> so that it has work to do|solve *puzzles
    every day> so that you spot *tactics sooner|check your losses with an *engine>; otherwise you repeat your *mistakes
"""
GRAMMAR: dict[str, list[str]] = {}  # slot -> options
for _entry in re.split(r"\n(?=\S)", TABLES.strip()):  # an indented line continues its slot
    _slot, _, _body = _entry.partition(": ")
    GRAMMAR[_slot] = [" ".join(option.split()) for option in _body.split("|")]
WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")


def _stems(text: str) -> set[str]:
    """Return the distinct words of a text without a final s, so that "tyres" counts as "tyre"."""
    return {word.removesuffix("s") for word in WORD.findall(text.lower())}


def _sentences(text: str) -> list[str]:
    """Return the sentences of a text that hold words, in lower case and without punctuation."""
    return [" ".join(words) for part in re.split(r"[.!?\n]", text.lower()) if (words := WORD.findall(part))]


NAMES = {topic: _stems(topic) for topic, options in GRAMMAR.items() if ">" in options[-1]}
VOCABULARY = {topic: _stems(" ".join(re.findall(r"\*(\w+)", " ".join(GRAMMAR[topic])))) for topic in NAMES}


@dataclass(frozen=True)
class Pair:
    """A prompt (a transcript that ends in "Assistant:"), two answers, and gold_utility of each in nats."""

    prompt: str
    chosen: str
    rejected: str
    gold_chosen: float
    gold_rejected: float


def gold_utility(prompt: str, answer: str) -> float:
    """Return the exact utility of any answer to any prompt, in nats; it is the sum of these POINTS.

    The question is the last human turn; its topic is the one with most NAMES in it, then with most VOCABULARY
    (none without any). "word" is earned for each distinct word of that vocabulary that the answer uses and the
    question does not, up to MAX_WORDS; "no_word" is lost when the answer uses none of it. "courtesy", "reason",
    "evasion" and "rudeness" count once, for any of their MARKERS. "repeat" is lost for each sentence equal to an
    earlier one of the answer, "copy" when the answer holds the question's last sentence (of over three words),
    "breaks_off" when it does not end in ``.``, ``!`` or ``?``. An answer without words has "empty" alone.
    """
    question = prompt.rpartition("\n\nHuman:")[2].partition("\n\nAssistant:")[0]
    asked, said, seen = _sentences(question), _sentences(answer), _stems(question)
    if not said:
        return POINTS["empty"]
    hits = {topic: (len(NAMES[topic] & seen), len(VOCABULARY[topic] & seen)) for topic in NAMES}
    topic = max(hits, key=hits.__getitem__)
    used = _stems(answer) & VOCABULARY[topic] if any(hits[topic]) else set()
    score = POINTS["word"] * min(MAX_WORDS, len(used - seen)) if used else POINTS["no_word"]
    text = f" {' | '.join(said)} "  # the bar keeps a marker from running over the end of a sentence
    score += sum(POINTS[kind] for kind, marks in MARKERS.items() if any(f" {m} " in text for m in marks.split("|")))
    score += POINTS["repeat"] * (len(said) - len(set(said)))
    score += POINTS["copy"] * bool(asked and asked[-1].count(" ") > 2 and f" {asked[-1]} " in text)
    score += POINTS["breaks_off"] * (not answer.rstrip(" \n\"')]”’").endswith((".", "!", "?")))
    return round(score, 6)  # equally good answers compare as equal, whatever the order of the sum


def _pick(rng: random.Random, options: list[str]) -> str:
    """Return one option with its choices drawn."""
    return re.sub(r"\((.*?)\)", lambda m: rng.choice(m[1].split("/")), rng.choice(options))


def _answer(rng: random.Random, tips: list[str], civil: bool = False) -> str:
    """Return an answer that draws on the tips; a civil one is neither evasive nor rude."""
    has = {k: rng.random() < share and not (civil and k in ("evasion", "rudeness")) for k, share in SHARE.items()}
    has["courtesy"] &= not has["rudeness"]  # both at once would read as sarcasm
    bare = has["no_tip"] and (has["evasion"] or has["rudeness"])
    rest = [tips[i] for i in sorted(rng.sample(range(len(tips)), 0 if bare else rng.choice(TIP_COUNTS)))]
    parts, after = [], []
    frames = {1: rng.sample(GRAMMAR["one"], 3), 2: rng.sample(GRAMMAR["two"], 1)}  # no frame comes twice
    for kind in ("courtesy", "rudeness", "evasion"):
        if has[kind] and rng.random() < 0.6:
            parts.append(_pick(rng, GRAMMAR[kind + "_open"]))
        elif has[kind]:
            after.insert(0, _pick(rng, GRAMMAR[kind + "_end"]))
    if has["lead"] and not (bare or has["rudeness"]):
        parts.append(_pick(rng, GRAMMAR["lead"]))
    while rest:
        size = 2 if len(rest) > 1 and rng.random() < 0.5 else 1
        heads = [tip.partition(">")[0] for tip in rest[:size]]
        if has["reason"] and (size == len(rest) or rng.random() < 0.5):
            heads[-1] = rest[size - 1].replace(">", "")
        parts.append(frames[size].pop().format(*heads))
        rest = rest[size:]
    parts += [_pick(rng, GRAMMAR["aside"])] * has["aside"] + after
    text = " ".join(part[0].upper() + part[1:] for part in parts)
    return text if len(text.split()) in LENGTHS else _answer(rng, tips, civil)


def _make_pair(rng: random.Random) -> Pair:
    """Draw a prompt, two different answers to it, and the noisy verdict."""
    options = [option.replace("*", "") for option in GRAMMAR[rng.choice(list(NAMES))]]
    tips = [option for option in options if ">" in option]
    first, last = (_pick(rng, [option]) for option in rng.sample(options[: -len(tips)], 2))
    preface = f" {_pick(rng, GRAMMAR['preface'])}" if rng.random() < SHARE["preface"] else ""
    prompt = f"\n\nHuman:{preface} {first}\n\nAssistant:"
    if rng.random() < SHARE["follow_up"]:  # the tips of the earlier answer are not for the later ones
        told = [tips[i] for i in sorted(rng.sample(range(len(tips)), 3))]
        prompt += f" {_answer(rng, told, civil=True)}\n\nHuman: {_pick(rng, GRAMMAR['thanks'])} {last}\n\nAssistant:"
        tips = [tip for tip in tips if tip not in told]
    a = b = _answer(rng, tips)
    while a == b:
        b = _answer(rng, tips)
    u_a, u_b = gold_utility(prompt, a), gold_utility(prompt, b)
    a_wins = rng.random() < 1 / (1 + math.exp(u_b - u_a))
    return Pair(prompt, a, b, u_a, u_b) if a_wins else Pair(prompt, b, a, u_b, u_a)


def make_pairs(n: int, seed: int = 0) -> list[Pair]:
    """Return n pairs; pair i depends on (seed, i) only, so a longer list starts with a shorter one."""
    return [_make_pair(random.Random(f"{seed}-{i}")) for i in range(n)]


def ceiling(pairs: list[Pair]) -> float:
    """Return the best accuracy (0 to 1) that any reward model can expect: the mean of sigmoid(|gold gap|)."""
    return sum(1 / (1 + math.exp(-abs(p.gold_chosen - p.gold_rejected))) for p in pairs) / len(pairs)
