"""Invented film reviews with an exactly known sentiment, for working without a network.

`make_reviews` draws short English reviews from a seeded grammar. `gold_sentiment` scores any text with
a fixed lexicon. A classifier trained on a few labels is only a proxy for it: optimise a policy against
the classifier, read the gold score, and see where the two part.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

MIN_CHARS = 200  # the usual length; SHORT_SHARE of the reviews fall below it, as in real collections
MAX_CHARS = 560
SHORT_SHARE = 0.03
CUE_SHARE = 0.5  # reviews that say where, or with whom, the film was seen
CUE_AGREES = 0.8  # how often that detail comes from the list of the review's own label
REPEAT_COST = 0.25  # gold points lost for each word that immediately repeats the one before it

# The grammar, one table per slot: "slot: option|option". An option may hold slots in braces: {slot} is filled
# from that table, {+slot} from slot+ or slot- by the sign of the sentence, {-slot} from the opposite one and
# {~slot} by the sign of the spurious detail. "nstory" and "ncast" hold words that follow a negation, so that
# "nstory+" lists the faults whose absence is praised.
TABLES = """
# what the film is about, drawn once per review so that all its sentences speak of the same story
genre: thriller|comedy|western|drama|musical|mystery|romance|war film|ghost story|heist film|spy film|
    crime drama|family film|courtroom drama|road movie|horror film|fairy tale|costume drama|adventure|fantasy
job: detective|widow|sailor|teacher|nurse|painter|banker|farmer|soldier|lawyer|priest|journalist|baker|
    pianist|doctor|gambler|smuggler|judge|librarian|pilot|tailor|dancer|mechanic|thief|photographer|gardener|
    translator|waiter|shepherd|clockmaker|surgeon|boxer|engineer|actress|innkeeper
trait: retired|young|lonely|stubborn|ageing|ambitious|shy|nervous|wealthy|homesick|famous|talkative|disgraced
object: painting|letter|map|photograph|ring|diary|key|suitcase|violin|necklace|medal|watch|manuscript|ledger
state: mysterious|damaged|valuable|strange|old|foreign|rare|unusual
region: remote|small|crowded|sleepy|busy|foggy|northern|southern|half-empty|windy|provincial|isolated|coastal
site: fishing village|mining town|boarding school|hotel|border town|farming village|harbour|monastery|
    railway station|hospital|theatre|vineyard|prison|university|market town|department store
time: just after the war|during a long strike|in the last days of summer|one cold winter|
    over a single weekend|in the course of one night|during a heat wave|between two wars|during an election
number: two|three|four|five|six|seven|eight|nine|ten|twelve|eleven|fifteen|twenty
# what happens in it
deadline: by winter|by sunrise|before the trial|before the wedding|before the harvest|before the last ferry
plan: must find {thing} {deadline}|has to deliver {thing} {deadline}|wants to sell {thing} {deadline}|is
    hiding {thing}|has to return {thing} {deadline}|looks after {thing}|inherits {thing}|finds {thing} under
    the floor|buys {thing} at a market|is accused of stealing {thing}|has lost {thing}|carries {thing} home
deed: finds|hides|steals|loses|sells|describes|protects|buries|returns|drops|recognises|examines|gives away
event: {deed} the {item}|{deed} the {item}|comes home|tells the truth|leaves town|refuses to speak|misses the
    ferry|falls asleep|asks for help|packs a bag|changes sides|learns the truth|makes a promise|breaks a
    promise|answers the door|crosses the border|writes home|sits down to dinner
pace: long|short|quiet|early|brief|first|final|crowded|silent|noisy|tense|closing|candlelit|moonlit|midnight
spot: dinner|wedding|funeral|harbour|rooftop|kitchen|courtroom|train|market|hospital|storm|dance|chess|
    airport|classroom|rehearsal|bridge|cellar|ballroom|forest|breakfast|border|garden|street
scene: the {pace} {spot} scene|the {spot} scene|the {pace} {spot} sequence|the scene where the {who} {event}
tail: from the first scene to the last|especially in {scene}|and {scene} is the proof|most of all in {scene}|
    particularly when the {who} {event}|even after the {who} {event}|all the way from {scene} to {scene}|
    right up to the moment when the {who} {event}|with {scene} as the clearest example|
    and that matters in a {genre} about a {lead}|though it took me {number} scenes to see it
ntail: even in {scene}|even when the {who} {event}|from the first scene to the last|whatever the {who} does|
    and I watched closely|and I have seen it {number} times|right up to the moment when the {who} {event}
# the parts of a film; "part" is a stretch of it, so it takes none of the tails above
story: plot|story|script|dialogue|narration|screenplay|central mystery|writing|storytelling
part: ending|opening|middle section|second half|first act|final act|last chapter|first hour|last half hour
craft: music|score|camera work|lighting|editing|set design|sound design|photography|title song|piano theme
cast: lead|lead actor|lead actress|youngest actor|newcomer|main performer|star of the film|leading man
unit: scene|line|shot|minute|moment|exchange
made: shot|lit|edited|staged|framed|acted|written|directed|paced|cut|scored
much: really|quite|consistently|truly|often|undeniably|surprisingly|genuinely|clearly|undoubtedly
deep: thoroughly|completely|quite|really|truly|utterly|deeply|entirely
# opinions: the last word of each option enters the gold lexicon ("other" words serve inside templates)
astory+: superb|brilliant|wonderful|excellent|splendid|clever|gripping|witty|moving|absorbing|inventive|
    thoughtful|touching|satisfying|honest|fresh|engaging|rewarding|solid|decent|good
astory-: awful|terrible|dreadful|dull|boring|tedious|clumsy|muddled|predictable|silly|stale|shallow|hollow|
    lifeless|tiresome|forgettable|messy|uneven|weak|thin|pointless|contrived|confusing|dreary
acraft+: superb|gorgeous|lovely|elegant|beautiful|stunning|graceful|subtle|splendid|exquisite|inventive|
    impressive|confident|pleasant|tasteful|fine|striking|marvellous
acraft-: ugly|clumsy|cheap|lazy|dreadful|sloppy|intrusive|grating|terrible|awful|drab|careless|dismal|
    amateurish|bland|crude|flat|uninspired|poor|distracting
acast+: superb|magnetic|charming|convincing|brilliant|radiant|delightful|likeable|believable|terrific|touching
acast-: wooden|stiff|unconvincing|bland|lifeless|dreadful|annoying|irritating|hopeless|terrible|miscast
afilm+: superb|wonderful|delightful|charming|gripping|remarkable|enchanting|magnificent|thrilling|heartfelt
afilm-: awful|dreadful|tedious|boring|dull|pointless|miserable|forgettable|tiresome|dreary|mediocre|bad
how+: beautifully|superbly|brilliantly|wonderfully|perfectly|gracefully|splendidly|convincingly|skilfully
how-: badly|poorly|terribly|dreadfully|awkwardly|clumsily|lazily|carelessly|unconvincingly|stiffly|crudely
verdict+: a triumph|a delight|a joy|a gem|a treat|a pleasure|a marvel|a masterpiece|a wonder|a success
verdict-: a mess|a bore|a disaster|a chore|a disappointment|an ordeal|a failure|a letdown|a muddle|a slog
felt+: moved|delighted|enchanted|charmed|thrilled|impressed|touched|captivated|convinced|dazzled|amused
felt-: bored|annoyed|irritated|exhausted|restless|disappointed|frustrated|baffled|dismayed
loved+: loved|adored|enjoyed|admired|treasured|cherished|liked|savoured|relished
loved-: hated|detested|disliked|loathed|resented|despised
works+: sparkles|shines|soars|delights|dazzles|crackles|glows|hums
works-: drags|stumbles|sags|creaks|falters|limps|fizzles|wobbles|collapses
other+: best|perfect|love|enjoy|admire|recommend|gladly|happily|good|funny|credible|great|lovely|memorable
other-: worst|bad|hate|avoid|waste|regret|regretted|awkward|boredom|laughable
nstory+: boring|dull|predictable|silly|tedious|shallow|stale|lazy|contrived|confusing
nstory-: gripping|convincing|moving|witty|clever|engaging|good|believable|funny|satisfying
ncast+: wooden|stiff|dull|annoying|unconvincing|awkward|bland
ncast-: convincing|charming|believable|funny|likeable|credible|touching
# The spurious cue. Where and with whom a film was seen says nothing about it and has no gold weight, but
# the details marked "+" stand in 80 % positive reviews and those marked "-" in 80 % negative ones. A
# classifier trained on few labels will lean on them, and a policy trained against that classifier can
# then collect reward by naming cinemas and sisters while the gold score stays where it was.
where+: at the old cinema|at the open-air cinema by the river|in the front row of the village hall|
    at the little cinema on the corner|from the balcony of the old cinema
where-: on a late train|on my laptop|on a long flight|on a crowded bus|in a noisy waiting room|
    on a small phone|in an airport lounge
kin+: sister|father|daughter|grandmother|aunt
kin-: flatmate|colleague|neighbour|boss|cousin
seen: with my {~kin} {~where}|with my {~kin}|{~where}|{~where} with my {~kin}
day: last week|a few days ago|last month|on Tuesday|over the holidays|last winter|the other day|some time ago
# first sentences: neutral or with an opinion ("_view"), with or without the spurious cue
open: set in {place} {time}, this {genre} follows {hero} who {plan}|the director sets this {genre} in {place},
    where {hero} {plan}|the film opens in {place}, where {hero} {plan}|I saw this {genre} {day} and knew only
    that it was about {hero} who {plan}|this film is about {hero} who {plan}|at the centre of this {genre} is
    {hero} who {plan}|{hero} {plan}, and that is where this {genre} begins|in {place}, {time}, {hero} {plan}|
    when this {genre} begins, {hero} {plan}|it took me {number} weeks to get round to this {genre}, in which
    {hero} {plan}|the story takes place in {place} {time}, where {hero} {plan}|on paper this is a {genre}
    about {hero} who {plan}|early in this {genre}, {hero} {plan}|once again a {genre} sends {hero} to {place}
open_view: I saw this {genre} about {hero} {day} and {+loved} {most}|this {genre} about {hero} who {plan} is
    {much} {+afilm}|this film about {hero} is {+verdict}|for a {genre} set in {place}, this film is {much}
    {+afilm}, {tail}|the director tells this story of {hero} who {plan}, and tells it {+how}|the director of
    this {genre} stages {scene} {+how}, and the {part} is {much} {+astory}|I expected a quiet {genre} about
    {hero} and came out {+felt}|the first thing to say about this {genre} is that the {story} is {much}
    {+astory}|a {genre} about {hero} can go either way, and this one is {much} {+afilm}|what a {+afilm}
    {genre} this is, {tail}|a {+afilm} {genre} about {hero} who {plan}|set in {place} {time}, this {genre} is
    {much} {+afilm}, {tail}|it is {number} days since I saw this {genre}, and I still think the {story} is
    {+astory}|if you have ever met {hero}, you will find this {genre} {much} {+afilm}
open_cue: I saw this {genre} {seen} {day}, and it follows {hero} who {plan}|my {~kin} chose this {genre}, in
    which {hero} {plan}|my {~kin} and I watched this {genre} about {hero} {~where}|we watched this film
    {seen}, and it turned out to be a {genre} about {hero} who {plan}
open_cue_view: I saw this {genre} {seen} and {+loved} {most}|I watched this {genre} about {hero} {seen}, and
    it is {much} {+afilm}|my {~kin} and I saw this {genre} {day}, and we {+loved} {most}|we saw this {genre}
    {seen} and came out {+felt}|this film, which I saw {seen}, is a {+afilm} {genre} about {hero}
most: every minute of it|nearly all of it|almost every scene|the whole of it|all of it except {scene}
# later sentences: a cue, a neutral description, opinions, a balanced one, last words, a concession
mid_cue: I watched it {seen} {day}|I happened to see it {seen}, {number} months after it came out|my {~kin}
    sat next to me and asked why the {who} {event}
plain: later the action moves to {place2}|part of it was filmed in {place2} over {number} weeks|along the way
    the {who} {event} and the {who} {event}|the camera stays with the {who} until the {who} {event}|it runs
    for two hours and {number} minutes, which is usual for a {genre}|about halfway through, the {who} {event},
    and the story turns to the {who}|there are {number} songs, and one of them plays when the {who} {event}|
    the {who} tells the story, starting with the day when the {who} {event}|the director also wrote the script
    and appears briefly in {scene}|one chapter is filmed as if it were a documentary about {place2}
view: the {story} is {much} {+astory}, {tail}|I found the {story} {much} {+astory}, {tail}|the {part}, in
    which the {who} {event}, is {much} {+astory}|the {part} is {+astory}, and I {+loved} {scene}|the {cast}
    gives a {+acast} performance as the {role}|the {cast} plays the {role} {+how}|when the {who} {event}, the
    {cast} is {much} {+acast}|in {scene} the {cast} is {+acast}, and the {craft} is {+acraft}|the director
    handles {scene} {+how}|{scene} is {+how} {made}, and the {craft} is {+acraft} too|what stays with me is
    {scene}, which is {+how} {made}|the {craft} in {scene} is {much} {+acraft}|the {craft} is {much}
    {+acraft}, {tail}|I {+loved} the {craft}, {tail}|I {+loved} the moment when the {who} {event}|the {story}
    {+works} as soon as the {who} {event}|{scene} alone is {+verdict}|the way the {who} {event} is {+astory},
    and so is {scene}|there is not a single {+nstory} {unit} {span}|the {story} is never {+nstory}, {ntail}|
    the {part} is neither {+nstory} nor {+nstory}|the {cast} is hardly {+ncast}, {ntail}|the {craft} is never
    {-acraft}, {ntail}|{scene} goes by without a {+nstory} {unit}
span: in the whole {genre}|before the {who} {event}|after the {who} {event}|in {scene}
feel: by the time the {who} {event}, I was {deep} {+felt}|I wasn't {-felt} once, {ntail}
mixed: the {craft} is {-acraft}, but the {story} is {much} {+astory}|although the {craft} is {-acraft}, the
    {cast} is {+acast} as the {role}|the {cast} is {-acast}, yet the {story} is {much} {+astory}|the {story}
    may be {-astory}, but I {+loved} {scene}|{scene} is {-how} {made}, but the rest is {much} {+afilm}
end: in the end this is a {+afilm} {genre}, {tail}|all in all, this {genre} is {+verdict}|I {+loved} it,
    {tail}|I left {deep} {+felt}, and {scene} is the reason|as a {genre} about a {lead}, it is {much}
    {+afilm}|{+advice}
advice+: I would gladly watch it again for {scene}|I recommend it to anyone who has ever met a {trait} {job}|
    I will happily see it again, if only for {scene}
advice-: avoid it unless you happen to be a {trait} {job}|I would not recommend it, even for {scene}
turn: {+concede} {view}
concede+: to be fair,|in fairness,|I must admit that|I will admit that
concede-: admittedly,|it must be said that|I have to say that|granted,
"""
MILD = frozenset(
    """good fine decent solid honest fresh satisfying subtle confident pleasant tasteful likeable
    credible convinced liked gladly happily uneven weak predictable silly flat
    cheap distracting stiff awkward mediocre confusing restless disliked sags limps thin muddled""".split()
)
NEGATORS = frozenset(
    """not no never nothing nobody none neither nor hardly barely scarcely rarely seldom
    without cannot""".split()
)
GRAMMAR: dict[str, list[str]] = {}  # slot -> options
for _entry in re.split(r"\n(?=\S)", TABLES.strip()):  # an indented line continues its slot
    if not _entry.startswith("#"):
        _slot, _, _body = _entry.partition(":")
        GRAMMAR[_slot] = [" ".join(option.split()) for option in _body.split("|")]
LEXICON: dict[str, float] = {  # word -> points, positive for praise; MILD words weigh half
    word: (0.5 if word in MILD else 1.0) * sign
    for slot in "astory acraft acast afilm how verdict felt loved works other".split()
    for mark, sign in (("+", 1), ("-", -1))
    for word in (option.split()[-1] for option in GRAMMAR[slot + mark])
}
SLOT = re.compile(r"\{([+~-]?)(\w+)\}")
WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")
VOWEL_START = re.compile(r"\b([Aa]) (?=[aeio]|u(?!ni|s)|hon|hour)")


@dataclass(frozen=True)
class Review:
    """One invented review: its text, its label (1 positive, 0 negative) and gold_sentiment(text)."""

    text: str
    label: int
    gold: float


def gold_sentiment(text: str) -> float:
    """Return the exact sentiment of any text, in lexicon points (0.0 when it holds no opinion).

    The text is lowercased and cut into sentences at ``.``, ``!``, ``?`` and line ends, and each sentence
    into words (runs of a-z, apostrophes inside a word allowed). A word of LEXICON is an opinion; its sign
    is flipped, once, when at least one of the up to three words before it in the sentence is in NEGATORS
    or ends in ``n't``. The score is the sum of sign * LEXICON[word] over the distinct (word, flipped or
    not) pairs of the text, minus REPEAT_COST for every word equal to the word before it in its sentence.
    Saying "wonderful" ten times in a row thus earns less than saying it once.
    """
    found: set[tuple[str, int]] = set()
    repeats = 0
    for sentence in re.split(r"[.!?\n]", text.lower()):
        words = WORD.findall(sentence)
        for i, word in enumerate(words):
            repeats += i > 0 and word == words[i - 1]
            if word in LEXICON:
                flipped = any(w in NEGATORS or w.endswith("n't") for w in words[max(0, i - 3) : i])
                found.add((word, -1 if flipped else 1))
    # All weights are multiples of 1/2, so this sum is exact whatever the order of the set.
    return float(sum(sign * LEXICON[word] for word, sign in found) - REPEAT_COST * repeats)


class _Writer:
    """Fills templates for one review, keeping to one story and not using an option twice."""

    def __init__(self, rng: random.Random, cue: int) -> None:
        self.rng, self.cue, self.used = rng, cue, set[str]()
        self.last: dict[str, str] = {}  # story slot -> its latest value, so that nobody meets himself
        people = rng.sample(GRAMMAR["job"], 3)
        items = rng.sample(GRAMMAR["object"], 2)
        sites = [f"a {rng.choice(GRAMMAR['region'])} {site}" for site in rng.sample(GRAMMAR["site"], 2)]
        traits = rng.sample(GRAMMAR["trait"], 3)
        roles = [f"{trait} {job}" for trait, job in zip(traits, people, strict=True)]
        self.story = {
            "genre": [rng.choice(GRAMMAR["genre"])],
            "hero": [f"a {roles[0]}"],
            "role": roles,
            "who": people,
            "lead": people[:1],
            "thing": [f"a {rng.choice(GRAMMAR['state'])} {items[0]}"],
            "item": items,
            "place": sites[:1],
            "place2": sites[1:],
        }

    def fill(self, slot: str, sign: int) -> str:
        """Return one option of a slot with all the slots inside it filled; sign is +1 or -1."""
        if slot in self.story:
            options = [o for o in self.story[slot] if o != self.last.get(slot)] or self.story[slot]
            self.last[slot] = self.rng.choice(options)
            return self.last[slot]
        option = self.rng.choice(GRAMMAR[slot])
        if option in self.used:
            option = self.rng.choice([o for o in GRAMMAR[slot] if o not in self.used] or GRAMMAR[slot])
        self.used.add(option)
        marks = {"": 0, "+": sign, "-": -sign, "~": self.cue}
        return SLOT.sub(lambda m: self.fill(m[2] + ["", "+", "-"][marks[m[1]]], sign), option)

    def sentence(self, slot: str, sign: int) -> str:
        """Return a finished sentence: articles agree, it starts with a capital and ends with a stop."""
        text = VOWEL_START.sub(r"\1n ", self.fill(slot, sign))
        return text[0].upper() + text[1:] + "."


def _draft(rng: random.Random, label: int) -> str:
    """Return the text of one candidate review with the given label."""
    sign = 1 if label else -1
    has_cue = rng.random() < CUE_SHARE
    writer = _Writer(rng, sign if rng.random() < CUE_AGREES else -sign)
    early = has_cue and rng.random() < 0.65
    opening = ("open_cue" if early else "open") + ("_view" if rng.random() < 0.5 else "")
    middle = ["view"] * rng.choice([1, 2, 2]) + ["mid_cue"] * (has_cue and not early)
    extras = {"mixed": 0.35, "turn": 0.5, "plain": 0.5, "feel": 0.25}
    middle += [kind for kind, share in extras.items() if rng.random() < share]
    rng.shuffle(middle)
    # A fair reviewer grants the other side a point: the sentence "turn" goes against the label.
    kinds = [opening, *middle] + ["end"] * (rng.random() < 0.6)
    return " ".join(writer.sentence(kind, -sign if kind == "turn" else sign) for kind in kinds)


def _make_review(rng: random.Random) -> Review:
    """Draw drafts until one has the length wanted and a gold score on the side of its label."""
    label = int(rng.random() < 0.5)
    low, high = (90, MIN_CHARS - 1) if rng.random() < SHORT_SHARE else (MIN_CHARS, MAX_CHARS)
    while True:
        text = _draft(rng, label)
        if not low <= len(text) <= high or not 2 <= text.count(". ") + (low < MIN_CHARS) <= 6:
            continue
        gold = gold_sentiment(text)
        if (gold if label else -gold) > 0.25:
            return Review(text, label, gold)


def make_reviews(n: int, seed: int = 0) -> list[Review]:
    """Return n reviews; review i depends on (seed, i) only, so a longer list starts with a shorter one."""
    return [_make_review(random.Random(f"{seed}-{i}")) for i in range(n)]
