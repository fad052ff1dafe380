// The search lists guides before experiments, and both before the reference and the changelog.
const FIRST = /^(index|getting_started|concepts|environments|policies|served|running|python|metrics|(algorithms|extending)\/)/;
const LAST = /^(changelog|api\/|source\/)/;

var Scorer = {
  score: ([docname, title, anchor, descr, score]) =>
    score * (FIRST.test(docname) ? 2 : LAST.test(docname) ? 0.3 : 1),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
