// Answers questions as the search field of a built site does: node search.js SITE < questions.json
// The site's own worker is run with its own index; what it posts is printed, a list of pages each.
const fs = require("fs");
const vm = require("vm");

const site = process.argv[2];
const { search } = JSON.parse(
  fs.readFileSync(`${site}/index.html`, "utf8").match(/id="__config"[^>]*>(.*?)<\/script>/s)[1]
);
let answer, posted;
const worker = {
  console,
  addEventListener: (_, listener) => (answer = listener),
  postMessage: (message) => posted(message),
};
worker.self = worker;
vm.runInNewContext(fs.readFileSync(`${site}/${search}`, "utf8"), worker);

const ask = (type, data) =>
  new Promise((done) => {
    posted = done;
    answer({ data: { type, data } });
  });

(async () => {
  const { config, docs } = JSON.parse(fs.readFileSync(`${site}/search/search_index.json`, "utf8"));
  await ask(0, { config, docs, options: { suggest: false } });
  const found = [];
  for (const question of JSON.parse(fs.readFileSync(0, "utf8"))) {
    const { data } = await ask(2, question);
    found.push(data.items.map(([first]) => first.location.split("#")[0]));
  }
  console.log(JSON.stringify(found));
})();
