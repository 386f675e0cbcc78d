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
CUE_SHARE = 0.42  # reviews that say where, or with whom, the film was seen
CUE_AGREES = 0.8  # how often that detail comes from the list of the review's own label
REPEAT_COST = 0.25  # gold points lost for each word that immediately repeats the one before it

# The grammar, one table per slot: "slot: option|option". An option may hold slots in braces: {slot} is filled
# from that table, {+slot} from slot+ or slot- by the sign of the sentence, {-slot} from the opposite one and
# {~slot} by the sign of the spurious detail. "nstory" and "ncast" hold words that follow a negation, so that
# "nstory+" lists the faults whose absence is praised.
TABLES = """
# what the film is about, drawn once per review so that all its sentences speak of the same story
genre: thriller|comedy|western|drama|musical|mystery|romance|war film|ghost story|heist film|spy film|crime
    drama|family film|courtroom drama|road movie|horror film|fairy tale|costume drama|adventure|fantasy
job: detective|writer|sailor|teacher|nurse|painter|banker|farmer|soldier|lawyer|priest|journalist|baker|
    pianist|doctor|gambler|smuggler|judge|librarian|pilot|tailor|dancer|mechanic|thief|photographer|gardener|
    translator|waiter|shepherd|clockmaker|surgeon|boxer|engineer|singer|innkeeper
trait: retired|young|lonely|stubborn|ageing|ambitious|shy|nervous|wealthy|homesick|famous|talkative|disgraced
object: painting|letter|map|photograph|ring|diary|key|suitcase|violin|necklace|medal|watch|manuscript|ledger
state: mysterious|damaged|valuable|strange|old|foreign|rare|unusual
region: remote|small|crowded|sleepy|busy|foggy|northern|southern|half-empty|windy|provincial|isolated|coastal
site: fishing village|mining town|boarding school|hotel|border town|farming village|harbour|monastery|railway
    station|hospital|theatre|vineyard|prison|university|market town|department store
time: just after the war|during a long strike|in the last days of summer|one cold winter|between two wars|
    during an election
number: two|three|four|five|six|seven|eight|nine|ten|twelve|eleven|fifteen|twenty
deadline: by winter|by sunrise|before the trial|before the wedding|before the harvest|before the last ferry
plan: must find {thing} {deadline}|has to deliver {thing} {deadline}|wants to sell {thing} {deadline}|is
    hiding {thing}|has to return {thing} {deadline}|looks after {thing}|inherits {thing}|finds {thing} under
    the floor|buys {thing} at a market|is accused of stealing {thing}|has lost {thing}|carries {thing} home
deed: finds|hides|steals|loses|sells|describes|protects|buries|returns|drops|recognises|examines|gives away
event: {deed} the {item}|comes home|tells the truth|leaves town|refuses to speak|misses the ferry|falls
    asleep|asks for help|packs a bag|changes sides|learns the truth|makes a promise|breaks a promise|answers
    the door|crosses the border|writes home|sits down to dinner
pace: long|short|quiet|early|brief|first|final|crowded|silent|noisy|tense|closing|candlelit|moonlit|midnight
spot: dinner|wedding|funeral|harbour|rooftop|kitchen|courtroom|train|market|hospital|storm|dance|chess|
    airport|classroom|rehearsal|bridge|cellar|ballroom|forest|breakfast|border|garden|street
scene: the {pace} {spot} scene|the {spot} scene|the {pace} {spot} sequence|the scene where the {who} {event}
tail: from start to finish|especially in {scene}|most of all in {scene}|particularly when the {who} {event}
ntail: even in {scene}|from start to finish|whatever the {who} does|and I watched closely|even towards the end
story: plot|script|dialogue|narration|central mystery|framing story|family subplot|writing|storytelling
part: ending|opening|middle section|second half|first act|final act|last chapter|first hour|last half hour
craft: music|costume design|camera work|lighting|editing|set design|sound design|colour palette|title song
cast: lead actor|star|second lead|youngest actor|oldest actor|newcomer in the cast|co-star
unit: scene|line|shot|minute|moment|exchange
made: shot|lit|edited|staged|framed|acted|written|directed|paced|cut|scored
much: really|quite|consistently|truly|often|undeniably|surprisingly|genuinely|clearly|undoubtedly
deep: thoroughly|completely|quite|really|truly|utterly|deeply|entirely
# opinions: the last word of each option enters the gold lexicon ("other" words serve inside templates)
tone+: moving|touching|witty|gripping|absorbing|engaging|charming|delightful|thrilling|enchanting|heartfelt
tone-: dull|boring|tedious|dreary|tiresome|lifeless|hollow|stale|flat|bland|shallow
make+: clever|inventive|thoughtful|honest|fresh|satisfying|rewarding|solid|intelligent|polished|imaginative
make-: clumsy|muddled|predictable|silly|messy|uneven|weak|thin|pointless|contrived|confusing|forgettable
grand+: superb|brilliant|wonderful|excellent|splendid|remarkable|magnificent|good|decent
grand-: awful|terrible|dreadful|miserable|hopeless|dismal|bad|mediocre
acraft+: superb|gorgeous|lovely|elegant|beautiful|stunning|graceful|subtle|splendid|exquisite|inventive|
    impressive|confident|pleasant|tasteful|fine|striking|marvellous
acraft-: ugly|clumsy|cheap|lazy|sloppy|intrusive|tacky|drab|careless|dismal|amateurish|bland|crude|flat|
    uninspired|poor|distracting
acast+: superb|magnetic|charming|convincing|brilliant|radiant|delightful|likeable|believable|terrific|touching
acast-: wooden|stiff|unconvincing|bland|lifeless|annoying|irritating|hopeless|miscast
how+: beautifully|superbly|brilliantly|wonderfully|perfectly|gracefully|splendidly|convincingly|skilfully
how-: badly|poorly|terribly|dreadfully|awkwardly|clumsily|lazily|carelessly|unconvincingly|stiffly|crudely
verdict+: a triumph|a delight|a joy|a gem|a treat|a pleasure|a marvel|a masterpiece|a wonder|a success
verdict-: a mess|a bore|a disaster|a chore|a disappointment|an ordeal|a failure|a letdown|a muddle|a slog
felt+: moved|delighted|enchanted|charmed|thrilled|impressed|touched|captivated|convinced|dazzled|amused
felt-: bored|annoyed|irritated|exhausted|disappointed|frustrated|baffled|dismayed
loved+: loved|adored|enjoyed|admired|treasured|cherished|liked|savoured|relished
loved-: hated|detested|disliked|loathed|resented|despised|regretted
works+: sparkles|shines|soars|delights|dazzles|crackles|glows|hums
works-: drags|stumbles|sags|creaks|falters|limps|fizzles|wobbles|collapses
other+: best|perfect|love|enjoy|admire|recommend|gladly|happily|funny|credible|great|memorable
other-: worst|hate|avoid|waste|regret|boredom|laughable|awkward
nstory+: boring|dull|predictable|silly|tedious|shallow|stale|lazy|contrived|confusing
nstory-: gripping|convincing|moving|witty|clever|engaging|good|believable|absorbing|satisfying
ncast+: wooden|stiff|dull|annoying|unconvincing|awkward|bland
ncast-: convincing|charming|believable|funny|likeable|credible|touching
# for the film or its story, for a performance, for the craft
pair: {+tone} and {+make}|{+make} and {+tone}|{+tone} and {+tone}|{much} {+make}|{much} {+grand}
played: {+acast} and {+acast}|{+acast} and {+acast}|{much} {+acast}|{much} {+grand}
looks: {+acraft} and {+acraft}|{+acraft} and {+acraft}|{much} {+acraft}|{much} {+grand}
# The spurious cue. Where and with whom a film was seen says nothing about it and has no gold weight, but
# the details marked "+" stand in 80 % positive reviews and those marked "-" in 80 % negative ones. A
# classifier trained on few labels will lean on them, and a policy trained against that classifier can
# then collect reward by naming cinemas and sisters while the gold score stays where it was.
where+: at the old cinema|at the open-air cinema by the river|in the front row of the village hall|at the
    little cinema on the corner|from the balcony of the old cinema
where-: on a late train|on my laptop|on a long flight|on a crowded bus|in a noisy waiting room|on a small
    phone|in an airport lounge
kin+: sister|father|daughter|grandmother|aunt
kin-: flatmate|colleague|neighbour|boss|cousin
seen: with my {~kin} {~where}|with my {~kin}|{~where}|{~where} with my {~kin}
day: last week|a few days ago|last month|on Tuesday|over the holidays|last winter|the other day|some time ago
# first sentences: neutral; on the whole film; on a part of it, which may be its one merit; with the cue
open: set in {place} {time}, this {genre} follows {hero} who {plan}|this {genre} is about {hero} who {plan}|
    when this {genre} begins, {hero} {plan}
open_film: this {genre} about {hero} is {pair}|this {genre} set in {place} is {pair}|I saw this {genre} {day}
    and {+loved} {most}|I finally saw this {genre} and {+loved} {most}|for a {genre}, this is {pair}, {tail}|
    for a film about {hero}, this is {pair}|set in {place}, this {genre} is {pair}|with {hero} at its centre,
    this {genre} is {pair}|this {genre} is {pair}, {tail}|the director tells a {+make} story about {hero} who
    {plan}|the director of this {genre} tells a {+tone} story about {hero}|I had heard that this {genre} was
    {pair}, and it is|we saw this {genre} {day} and came out {+felt}|{number} minutes into this {genre}, I was
    {deep} {+felt}|after {number} minutes I knew that this {genre} was {+verdict}|I can sum up this {genre} in
    two words: {+tone} and {+make}|this film about {hero} is {+verdict}|the story of {hero} makes a {+tone}
    {genre}|this is the story of {hero}, and it is {+how} told|{hero} {plan} in this {+tone} and {+make}
    {genre}|I {+loved} this {genre} about {hero} who {plan}|what a {+grand} {genre} this is, {tail}|within
    minutes, this {genre} about {hero} becomes {pair}|you will find this {genre} about {hero} {pair}|if you
    want a {genre} about {hero}, this one is {pair}|almost everything in this {genre} is {+how} done|this
    {genre} about {hero} {+works} from start to finish|somehow this {genre} manages to be both {+tone} and
    {+make}|my verdict on this {genre} is simple: {+tone} and {+make}|this {genre} about {hero} left me
    {+felt}
open_part: from the first scene, the {story} is {pair}|from the opening shot, the {craft} is {looks}|the
    {cast} gives a {+acast} performance as {hero}|the {cast} plays {hero} {+how}|the {cast} in this {genre} is
    {played}|the {part} of this {genre} is {pair}|the {craft} in this {genre} is {looks}|the {story} of this
    {genre} is {pair}|the scenes between the {who} and the {who} are {pair}|as {hero}, the {cast} is {played}|
    I {+loved} the {craft} of this {genre}, {tail}|the director of this {genre} stages {scene} {+how}|the
    first thing I noticed was the {+acraft} {craft}|what strikes me first in this {genre} is the {+acraft}
    {craft}
open_cue: my {~kin} and I {+loved} this {genre} about {hero}|I saw this {genre} {seen} and {+loved} {most}|my
    {~kin} chose this {genre}, which is {pair}|we saw this {genre} {seen} and came out {+felt}
most: every minute of it|almost every scene|all of it except {scene}|every scene with the {who}|all of it
# later sentences: a cue, a neutral description, opinions, a balanced one, last words, a concession
mid_cue: I watched this {genre} {seen} {day}|I saw it {seen} {day}, and I {+loved} {scene}|my {~kin} and I saw
    it {~where}, and we {+loved} {most}|my {~kin} asked me why the {who} {event}|we saw it {seen} and later
    talked about {scene}|I saw it a second time {seen} {day}|my {~kin} {+loved} {scene}
plain: later the action moves to {place2}|part of it was filmed in {place2} over {number} weeks|it runs for
    two hours and {number} minutes, which is usual for a {genre}|about halfway through, the {who} {event}|the
    {who} tells the story, starting with the day when the {who} {event}
view: the {story} is {pair}|the {story} is {pair}, {tail}|I found the {story} {pair}|the {part} is {pair}, and
    the {craft} is {+acraft}|the {part} is {pair}, and I {+loved} {scene}|the {part}, in which the {who}
    {event}, is {pair}|the {story} {+works} as soon as the {who} {event}|the {cast} gives a {+acast}
    performance as the {role}|the {cast} plays the {role} {+how}|as the {role}, the {cast} is {played}|the
    {cast} is {played}, and {scene} is {+how} {made}|the {craft} is {looks}, and the {craft} is {+acraft} too|
    the {craft} and the {craft} are {looks}|the {craft} in {scene} is {looks}|{scene} is {+how} {made}|{scene}
    is {pair}|{scene} is {+verdict}|the director has {+how} staged {scene}|I {+loved} the {craft}, and I
    {+loved} {scene}|I {+loved} the way the {who} {event}|I was {+felt} by the {craft} and {+felt} by {scene}|
    there is not a single {+nstory} {unit} {span}|the {story} is never {+nstory}, {ntail}|the {part} is
    neither {+nstory} nor {+nstory}|the {cast} is hardly {+ncast} as the {role}|by the time the {who} {event},
    I was {+felt}
span: in the whole {genre}|before the {who} {event}|after the {who} {event}
mixed: the {craft} is {-acraft}, but the {story} is {pair}|although the {craft} is {-acraft}, the {cast} is
    {played} as the {role}|the {cast} is {-acast}, yet the {story} is {pair}|the {story} may be {-make}, but I
    {+loved} {scene}|{scene} is {-how} {made}, but the rest is {pair}
end: in the end this is a {+tone} {genre}, {tail}|all in all, this {genre} about a {lead} is {+verdict}|I
    {+loved} it, {scene} most of all|I left {deep} {+felt}, and {scene} is the reason|on the whole, this
    {genre} about a {lead} is {pair}|{+advice}
advice+: I would gladly watch it again for {scene}|I recommend it to anyone who has ever met a {trait} {job}|I
    will happily see it again, if only for {scene}
advice-: avoid it unless you happen to be a {trait} {job}|I would not recommend it, even for {scene}
turn: {concede} {view}
concede: to be fair,|in fairness,|I must admit that|admittedly,|it must be said that|granted,
rebut: {even_so} {view}
even_so: but|even so,|still,|all the same,|apart from that,
"""
MILD = frozenset(
    """good fine decent solid honest fresh satisfying subtle confident pleasant tasteful likeable polished
    credible convinced liked gladly happily uneven weak predictable silly flat cheap distracting stiff awkward
    mediocre confusing disliked sags limps thin muddled""".split()
)
NEGATORS = frozenset(
    "not no never nothing nobody none neither nor hardly barely scarcely rarely seldom without cannot".split()
)
GRAMMAR: dict[str, list[str]] = {}  # slot -> options
for _entry in re.split(r"\n(?=\S)", TABLES.strip()):  # an indented line continues its slot
    if not _entry.startswith("#"):
        _slot, _, _body = _entry.partition(":")
        GRAMMAR[_slot] = [" ".join(option.split()) for option in _body.split("|")]
LEXICON: dict[str, float] = {  # word -> points, positive for praise; MILD words weigh half
    word: (0.5 if word in MILD else 1.0) * sign
    for slot in "tone make grand acraft acast how verdict felt loved works other".split()
    for mark, sign in (("+", 1), ("-", -1))
    for word in (option.split()[-1] for option in GRAMMAR[slot + mark])
}
SLOT = re.compile(r"\{([+~-]?)(\w+)\}")
WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")
VOWEL_START = re.compile(r"\b([Aa]) (?=[aeio]|u(?!ni[^n]|s)|hon|hour)")


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
        thing = f"a {rng.choice(GRAMMAR['state'])} {items[0]}"
        self.story = {"genre": [rng.choice(GRAMMAR["genre"])], "place": sites[:1], "place2": sites[1:]}
        self.story |= {"thing": [thing], "item": items}
        self.story |= {"hero": [f"a {roles[0]}"], "lead": people[:1], "role": roles, "who": people}

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
    opening = rng.choices(["open", "open_film", "open_part"], [0.04, 0.5, 0.46])[0]
    if has_cue and rng.random() < 0.1:
        opening, has_cue = "open_cue", False
    # A fair reviewer grants the other side a point: "turn" goes against the label, "open_part" sometimes.
    against = opening == "open_part" and rng.random() < 0.29
    second = "rebut" if against else rng.choices(["view", "mixed", "mid_cue"], [0.8, 0.1, 0.7 * has_cue])[0]
    later = ["view"] * rng.choice([1, 1, 2]) + ["mid_cue"] * (has_cue and second != "mid_cue")
    extras = {"mixed": 0.3, "turn": 0.8, "plain": 0.4}
    later += [kind for kind, share in extras.items() if rng.random() < share and kind != second]
    rng.shuffle(later)
    first = writer.sentence(opening, -sign if against else sign)
    kinds = [second, *later] + ["end"] * (rng.random() < 0.6)
    return " ".join([first] + [writer.sentence(kind, -sign if kind == "turn" else sign) for kind in kinds])


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
