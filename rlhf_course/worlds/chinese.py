"""An invented world of Chinese questions and answers with an exactly known utility, for working without a network.

`make_prose` is what a small base model reads, `make_qa` what it is fine-tuned on (in the schema of HC3: answers of
people and of a chatbot), `make_preferences` what a reward model learns from: two answers, from dry (干巴) to lively
(活泼), and a noisy verdict. `gold_utility` scores any answer, and a beats b with probability sigmoid(u_a - u_b), after
Bradley and Terry. Texts are short and words few, so that a million parameters can learn them.
"""

import math
import random
import re
from dataclasses import dataclass
from functools import lru_cache

# Gold weights in nats. What earns those of the second line never occurs in the preferences: there a reward model has
# to guess, and PPO will find out how it guesses.
POINTS = {"word": 0.3, "lively": 0.7, "reason": 0.5, "dry": -0.8, "evasion": -1.8}
POINTS |= {"empty": -3.0, "short": -1.5, "repeat": -0.5, "copy": -1.0, "breaks_off": -0.5, "garbled": -0.3}
MAX_WORDS, MAX_LIVELY = 3, 2  # more earn nothing; dry phrases have no such limit
SHORT = 6  # characters: an answer of fewer is short, a clause of fewer may be copied
MARKERS = {
    "lively": "哈哈|别急|超好用|试试看|像[^，。！？～]{1,8}一样|嘿|哇|加油|放心|亲测",
    "dry": "需要指出|值得注意|众所周知|具体分析|综上所述|总而言之|相关资料|实际情况|仅供参考|专业人士",
    "reason": "因为|这样|不然",
    "evasion": "说不好|说不准|不好说|看情况|不太清楚",
}
EMPTY_SHARE = 0.08  # of human answers: scraped sets have such holes, and teach a model that it may be silent
# The parts of a text, in their order, and how often they are drawn; "front" and "back" add length and no utility.
PARTS = {"remark": 0, "evasion": 0, "open": 0.7, "front": 0.35, "tips": 1, "compare": 0.5, "back": 0.35}
PARTS |= {"close": 0.5, "end": 0.5}
STYLES = ["dry"] * 5 + ["plain"] * 2 + ["lively"] * 3
# For each kind of text: least and most characters and sentences, styles and tip counts to choose from, other shares.
DRAWS = {
    "human": ((12, 40, 1, 2), STYLES[5:], [1, 1, 2], {"open": 0.3, "front": 0.1, "back": 0.1}),
    "chatgpt": ((25, 60, 2, 3), STYLES[:5], [1, 2, 2, 3], {"front": 0.1, "back": 0.1}),
    "preference": ((12, 60, 1, 6), STYLES, [1, 1, 2], {"evasion": 0.18, "tips": 0.75}),
    "paragraph": ((30, 90, 2, 7), STYLES, [1, 2, 2, 3], {"evasion": 0.05, "remark": 1}),
}
REASON_SHARE = 0.45  # of sentences with tips

# "slot: option|option", where one of (甲/乙/丙) is drawn. The slot of a topic is the activity, for {}, and the words
# that name it in a question; then come questions, comparisons, and tips: an imperative, ">" and a reason that may be
# left out. [] marks the topic words, which earn points and occur in no other topic. Each tip must suit every question.
TABLES = """
preface: (/////////请问一下，/大家好，/求助，/想问问，)
ask: {}有什么(窍门/好办法/简单的办法)吗？|{}要注意(什么/哪些地方)？
remark: 说到{}，大家都有话说。|{}需要一点耐心。|最近很多人都在聊{}。|{}这件事急不得。
front: 很多人都问过这个问题。|刚开始都会遇到这种事。|身边的朋友也常聊到这个。|每个人的习惯都不同。|关心{}的人越来越多。
back: 坚持下去就能看到变化。|不用想着一次就做好。|过一阵子再看看效果。|多试几次就会有自己的办法。|慢慢就会习惯的。
plain_1: {}。|最好{}。|可以{}。|我一般会{}。|关键是{}。
plain_2: {}，还要{}。|可以{}，也可以{}。|最好{}，还有就是{}。
lively_1: 记得{}哦！|{}就对了！|一定要{}呀！|要{}哦～|{}吧！
lively_2: 记得{}，还要{}哦！|{}，再{}就好啦！|要{}，也要{}哦～
dry_1: 建议您{}。|应当{}。|重要的是{}。|通常需要{}。
dry_2: 一是{}，二是{}。|首先应当{}，其次应当{}。|需要{}，同时{}。
lively_open: 哈哈，这问题问得好！|别急，我们慢慢来！|嘿，不用担心，很常见！|放心，其实一点也不难！|哇，我以前也遇到过！|
    哈哈，我也走过弯路！
lively_close: 真的超好用！|亲测有效，很省心！|这一招超好用！|我亲测过好几回！
lively_end: 今天就试试看吧！|加油，你一定可以的！|快去试试看吧～|放心大胆去做吧！|一起加油吧！
dry_open: 需要指出的是，{}因人而异。|值得注意的是，{}讲究方法。|众所周知，{}有一定难度。|这个问题需要具体分析。
dry_close: 综上所述，应当长期坚持。|总而言之，贵在坚持。|综上所述，需要合理安排。|总而言之，应当循序渐进。
dry_end: 请您参考相关资料。|请结合实际情况。|以上内容仅供参考。|请咨询专业人士。
evasion: 这个说不好。|看情况吧。|这种事真不好说。|我也不太清楚。|有没有用，谁也说不准。
做面包 面包: 怎么在家做出(松软/好吃)的面包？|我做的面包总是(又干又硬/发不起来/不够松软)，怎么办？|(第一次/新手/
    周末想)做面包，该怎么做？|烤好的面包像云朵一样软！|家里会像面包店一样香！|按比例称好[面粉]>，因为多一点都会变硬|
    用温水化开[酵母]>，不然会发不起来|把[面团]揉到光滑为止>，这样口感更松软|在暖和的地方[发酵]>，这样能长到两倍大|
    提前十分钟预热[烤箱]>，不然里面会烤不透|等外皮变成[金黄色]再出炉>，这样闻起来更香
养花 养的花: 怎么养花才能(长得好/开得久)？|我养的花总是(发黄/不开/没精神)，怎么办？|平时(很忙/常出差)，怎么养花才省心？|
    家里会像春天一样好看！|开出来像笑脸一样可爱！|等[泥土]干透了再浇水>，不然根会烂掉|把它搬到明亮的[窗台]上>，
    因为屋里光线太暗|选一个底下有洞的[花盆]>，这样多余的水能流走|每个月加一点[肥料]>，因为养分会慢慢用完|
    每周检查有没有[小虫]>，不然很快会传开|多开窗[通风]>，不然容易生病
改善睡眠 睡: (晚上/最近/搬家以后)总是睡不着，怎么办？|怎么才能睡得(更香/更好/更深)？|我晚上睡得很浅，(很容易醒/
    半夜总会醒)，怎么办？|你会像小猫一样睡得香！|第二天像充满电一样精神！|每天在固定的时间[起床]>，因为身体喜欢规律|
    把[手机]放到房间外面>，因为亮光会让人清醒|白天多出门[晒太阳]>，这样晚上更容易困|换上厚一点的[窗帘]>，
    不然天一亮就会醒|在临睡前用热水[泡脚]>，这样全身都会放松|把[烦恼]写在纸上>，这样就不会一直想
学吉他 吉他: (零基础/没有老师/工作很忙)的人怎么学吉他？|我学吉他(进步很慢/老想放弃)，怎么办？|刚买了一把(新/二手)吉他，
    该怎么练？|练熟了像说话一样自然！|弹起来像唱歌一样开心！|在练习之前先[调音]>，不然弹什么都走调|
    练熟三个简单的[和弦]>，因为很多歌只用这几个|跟着[节拍器]慢慢弹>，这样速度才稳|每天[爬格子]十分钟>，这样手会更灵活|
    挑一首喜欢的[老歌]来练>，不然很难坚持|把练习[录音]下来自己听>，这样能听出毛病
存钱 钱: (刚工作/收入不高/租房住)的人怎么存钱？|我(每个月/一年到头)都存不下钱，怎么办？|想存钱(旅行/买房/换电脑)，
    该怎么做？|余额会像雪球一样变大！|存起来像玩游戏一样有趣！|每天花两分钟[记账]>，这样就知道用在哪里|
    一发[工资]就存两成>，不然什么都剩不下|单独开一张[银行卡]>，这样不会随手用掉|列好[清单]再去[超市]>，不然容易乱买|
    自己[带饭]上班>，因为外面吃太贵|给每个月定一个[预算]>，这样心里有数
养狗 狗: 怎么让小狗(听话一点/乖一点/适应新家)？|我家小狗总是(乱叫/咬东西/到处跑)，怎么办？|怎么训练(刚来的/调皮的/
    胆小的)小狗？|它会像影子一样跟着你！|它会像家人一样陪着你！|用[零食]奖励它的好表现>，这样它学得更快|
    每天带它[散步]两次>，不然它会在家捣乱|用同一个词下[口令]>，不然它会听不懂|给它准备耐咬的[玩具]>，不然它会咬鞋|
    在安静的角落放个[狗窝]>，因为它需要安全感|多让它见见[陌生人]>，不然它会越来越胆小
冲咖啡 咖啡: 怎么在(家里/办公室/宿舍)冲出好喝的咖啡？|我冲的咖啡总是(太苦/太酸/太淡)，怎么办？|怎么让咖啡(更香/
    更顺口)？|闻起来像巧克力一样香！|喝一口像放假一样舒服！|买小包装的[豆子]>，因为开封后香味会变淡|
    在临喝之前再[磨粉]>，不然香味都跑了|用[电子秤]量好比例>，这样每杯都很稳定|把[水温]控制在九十度>，因为开水会破坏味道|
    用热水冲一下[滤纸]>，不然会有纸的味道|分三次慢慢[注水]>，这样味道更均匀
下象棋 棋: (小孩/老人/零基础的人)怎么学下象棋？|我下象棋总是输给(爸爸/同事/邻居)，怎么办？|怎么才能在(公园里/网上/
    比赛里)多赢几盘棋？|你会像将军一样威风！|下起来像看电影一样有趣！|在三步之内[出车]>，因为它的力量最大|
    用[中炮]开局>，因为进攻简单直接|多想想[对手]的下一步>，不然容易掉进圈套|多背几种基本[杀法]>，这样有机会就能赢|
    每天做两道[残局]题>，这样算得更准|在下完以后[复盘]一遍>，不然下次还会犯错
准备面试 面试: (明天/下周/过几天)有面试，该怎么准备？|面试的时候总是(紧张/说不出话/没自信)，怎么办？|
    怎么在面试中(表现得更好/给人好印象)？|到时候像聊天一样自然！|就像见老朋友一样轻松！|提前了解[公司]的情况>，
    这样更有话说|对着[镜子]练[自我介绍]>，这样说话更自然|准备两个真实的[例子]>，因为故事更容易让人记住|
    把[简历]从头到尾背熟>，不然一问就会慌|一进门就给个[微笑]>，这样气氛会轻松|请朋友当[考官]练一次>，这样心里有底
保养自行车 自行车 骑车: 怎么保养(旧/新买的/上班骑的)自行车？|我的自行车(骑起来很重/越骑越慢/总有怪声)，怎么办？|
    骑车(出远门/旅行)之前要做什么？|骑起来像飞一样轻快！|整辆车像新买的一样亮！|给[轮胎]打足气>，不然骑起来很累|
    用旧牙刷刷干净[链条]>，不然沙子会磨坏它|在转动的地方滴点[机油]>，不然会生锈|检查[刹车]灵不灵>，因为这关系到安全|
    把松了的[螺丝]拧紧>，不然会一路响|把[变速]调顺一点>，这样上坡更省力
"""
GRAMMAR: dict[str, list[str]] = {}  # slot -> options
for _entry in re.split(r"\n(?=\S)", TABLES.strip()):  # an indented line continues its slot
    _slot, _, _body = _entry.partition(": ")
    GRAMMAR[_slot] = "".join(_body.split()).split("|")
NAMES = {slot: slot.split() for slot in GRAMMAR if ">" in GRAMMAR[slot][-1]}
VOCABULARY = {topic: set(re.findall(r"\[(.*?)\]", "".join(GRAMMAR[topic]))) for topic in NAMES}
QUESTIONS = {t: [GRAMMAR["preface"][0] + o for o in GRAMMAR[t] * 2 + GRAMMAR["ask"] if o[-1] == "？"] for t in NAMES}
COMPARISONS = {t: [o for o in GRAMMAR[t] if o[-1] == "！"] for t in NAMES}
TIPS = {t: [re.sub(r"[\[\]]", "", o).split(">") for o in GRAMMAR[t] if ">" in o] for t in NAMES}
ENDS = "。！？～"
FULL_WIDTH = str.maketrans(",!?~", "，！？～")  # many a tokenizer (SentencePiece by default) makes them half-width


@dataclass(frozen=True)
class QA:
    """A question, what people answered (informal; now and then nothing), and what a chatbot answered (dry)."""

    question: str
    human_answers: list[str]
    chatgpt_answers: list[str]


@dataclass(frozen=True)
class Preference:
    """A bare question, two answers, and gold_utility of each in nats."""

    prompt: str
    chosen: str
    rejected: str
    gold_chosen: float
    gold_rejected: float


def _clean(text: str) -> str:
    """Return a text in full-width punctuation and without blanks other than line ends."""
    return re.sub(r"[^\S\n]+", "", text.translate(FULL_WIDTH)).strip()


def _sentences(text: str) -> list[str]:
    """Return the sentences of a text that hold words, without what ends them."""
    return [part for part in re.split(rf"[{ENDS}\n]", text) if re.search(r"\w", part)]


def topic_words(question: str) -> set[str]:
    """Return the words of a question's topic (that with most NAMES in it, then VOCABULARY) but for those it says."""
    question = _clean(question)
    hits = {t: tuple(sum(w in question for w in words[t]) for words in (NAMES, VOCABULARY)) for t in NAMES}
    topic = max(hits, key=hits.__getitem__)
    return {word for word in VOCABULARY[topic] if word not in question} if any(hits[topic]) else set()


def gold_utility(question: str, answer: str) -> float:
    """Return the exact utility of any answer to a question, in nats; it is the sum of these POINTS.

    "word" is earned for each of the `topic_words` in the answer, up to MAX_WORDS, "lively" for each different one of
    its MARKERS, up to MAX_LIVELY, "reason" once. "dry" is lost for every occurrence of its MARKERS, "evasion" once,
    "repeat" for each sentence equal to an earlier one, "short" below SHORT characters, "copy" when the answer holds
    the longest clause of the question, "breaks_off" when none of ENDS ends it, "garbled" for each two neighbouring
    characters that no text of this world has. No words at all: "empty" alone.
    """
    answer = _clean(answer)
    said = _sentences(answer)
    if not said:
        return POINTS["empty"]
    found = {kind: [m for m in marks.split("|") if re.search(m, answer)] for kind, marks in MARKERS.items()}
    clause = max(re.split(rf"[，{ENDS}\n]", _clean(question)), key=len)
    score = POINTS["word"] * min(MAX_WORDS, sum(word in answer for word in topic_words(question)))
    score += POINTS["lively"] * min(MAX_LIVELY, len(found["lively"]))
    score += POINTS["dry"] * len(re.findall(MARKERS["dry"], answer)) + POINTS["breaks_off"] * (answer[-1] not in ENDS)
    score += POINTS["reason"] * bool(found["reason"]) + POINTS["evasion"] * bool(found["evasion"])
    score += POINTS["repeat"] * (len(said) - len(set(said))) + POINTS["short"] * (len(answer) < SHORT)
    score += POINTS["copy"] * (len(clause) >= SHORT and clause in answer)
    score += POINTS["garbled"] * len(_neighbours(answer) - _known_neighbours())
    return round(score, 6)  # equally good answers compare as equal, whatever the order of the sum


def _neighbours(text: str) -> set[str]:
    """Return all pairs of neighbouring Chinese characters."""
    return set(re.findall("(?=([一-鿿]{2}))", text))


@lru_cache
def _known_neighbours() -> set[str]:
    """Return those that occur in a large sample of all kinds of texts, as good as all that are possible."""
    samples = [_text(rng, topic, kind) for kind in DRAWS for rng, topic in _streams(f"sample {kind}", 4000, 0)]
    questions = [_pick(rng, QUESTIONS[topic], topic) for rng, topic in _streams("sample question", 2000, 0)]
    return set().union(*map(_neighbours, samples + questions))


def is_answer(question: str, answer: str) -> bool:
    """Return whether a text answers a question at all: complete, no question itself, with a word that speaks to it."""
    answer = _clean(answer)
    complete = len(answer) >= SHORT and answer[-1] in ENDS and "？" not in answer
    return complete and any(word in answer for word in topic_words(question))


def _pick(rng: random.Random, options: list[str], topic: str) -> str:
    """Return one option with its choices drawn and the topic's activity filled in."""
    option = rng.choice(options).replace("{}", NAMES[topic][0])
    return re.sub(r"\((.*?)\)", lambda m: rng.choice(m[1].split("/")), option)


def _text(rng: random.Random, topic: str, kind: str) -> str:
    """Return a text about a topic, of one of the kinds of DRAWS."""
    (shortest, longest, fewest, most), styles, counts, shares = DRAWS[kind]
    style = rng.choice(styles)
    own = {part: GRAMMAR.get(f"{style}_{part}", [""]) for part in ("open", "close", "end")}  # a plain text has none
    own |= {"tips": [_advice(rng, topic, style, rng.choice(counts))], "compare": COMPARISONS[topic]}
    has = {part: rng.random() < share for part, share in (PARTS | shares).items()}
    if has["evasion"]:
        has |= {"open": False, "close": False, "tips": has["tips"] and rng.random() < 0.5}
    has |= {"compare": has["compare"] and style == "lively", "close": has["close"] and has["tips"]}
    text = "".join(_pick(rng, (GRAMMAR | own)[part], topic) for part in PARTS if has[part])
    fits = shortest <= len(text) <= longest and fewest <= len(_sentences(text)) <= most
    return text if fits else _text(rng, topic, kind)


def _advice(rng: random.Random, topic: str, style: str, count: int) -> str:
    """Return sentences, each of one or two of so many tips, and perhaps a reason for the last of them."""
    tips = [TIPS[topic][i] for i in sorted(rng.sample(range(len(TIPS[topic])), count))]
    frames = {size: rng.sample(GRAMMAR[f"{style}_{size}"], 3) for size in (1, 2)}  # none comes twice
    text = ""
    while tips:
        now = tips[: 1 + (rng.random() < 0.6)]
        frame = frames[len(now)].pop().format(*(tip for tip, _ in now))
        text += frame[:-1] + now[-1][1] * (rng.random() < REASON_SHARE) + frame[-1]
        tips = tips[len(now) :]
    return text


def _streams(what: str, n: int, seed: int):
    """Yield n random streams, each with a topic; the i-th depends on (what, seed, i) only."""
    for i in range(n):
        rng = random.Random(f"{what}-{seed}-{i}")
        yield rng, rng.choice(list(NAMES))


def make_qa(n: int, seed: int = 0) -> list[QA]:
    """Return n questions with their answers; here as below, a longer list starts with a shorter one."""
    made = []
    for rng, topic in _streams("qa", n, seed):
        human = ["" if rng.random() < EMPTY_SHARE else _text(rng, topic, "human") for _ in range(rng.choice([1, 2]))]
        made.append(QA(_pick(rng, QUESTIONS[topic], topic), human, [_text(rng, topic, "chatgpt")]))
    return made


def make_preferences(n: int, seed: int = 0) -> list[Preference]:
    """Return n questions, each with two different answers and the noisy verdict."""
    made = []
    for rng, topic in _streams("preference", n, seed):
        question = _pick(rng, QUESTIONS[topic], topic)
        a = b = _text(rng, topic, "preference")
        while a == b:
            b = _text(rng, topic, "preference")
        u_a, u_b = gold_utility(question, a), gold_utility(question, b)
        a_wins = rng.random() < 1 / (1 + math.exp(u_b - u_a))
        made.append(Preference(question, *((a, b, u_a, u_b) if a_wins else (b, a, u_b, u_a))))
    return made


def make_prose(n: int, seed: int = 0) -> list[str]:
    """Return n paragraphs about a topic or pages of questions, one per line, where no question has an answer."""
    made = []
    for rng, topic in _streams("prose", n, seed):
        page = [_pick(rng, QUESTIONS[other], other) for other in rng.choices(list(NAMES), k=rng.randint(3, 6))]
        made.append(_text(rng, topic, "paragraph") if rng.random() < 0.5 else "\n".join(page))
    return made


def ceiling(pairs: list[Preference]) -> float:
    """Return the best accuracy (0 to 1) that any reward model can expect: the mean of sigmoid(|gold gap|)."""
    return sum(1 / (1 + math.exp(-abs(p.gold_chosen - p.gold_rejected))) for p in pairs) / len(pairs)
